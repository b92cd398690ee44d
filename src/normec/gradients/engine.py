"""The interface of gradient engines, and the blocks of gradients that they yield."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..problems.objective import Buffers
from ..system.devices import upload


@dataclass(frozen=True)
class Block:
    """The gradients ``[c, d]`` and losses ``[c]`` of some clients (their numbers, sorted, on the host).

    A block lives until the next one is asked for: engines use its memory again, and whoever takes a block may
    overwrite its gradients. `rows` are the clients' rows in a table of all clients, for indexing on the device: a slice
    if their numbers are consecutive, which selects a view instead of a copy. `relative_to` gives the rows of a table
    that begins with the client `first` instead of client 0.

    Where clients make local steps, `grads` are their updates, and `start_grads` are their gradients at x.
    """

    clients: Tensor
    grads: Tensor
    losses: Tensor
    rows: Tensor | slice
    first: int = 0
    start_grads: Tensor | None = None

    @staticmethod
    def of(clients: Tensor, grads: Tensor, losses: Tensor) -> Block:
        """Return the block of these clients, with their rows in a table of all clients."""
        numbers = clients.numpy()
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(clients):
            return Block(clients, grads, losses, slice(first, last + 1))
        return Block(clients, grads, losses, upload(clients, grads.device))

    def relative_to(self, first: int) -> Block:
        """Return the same block with its rows counted in a table that begins with client `first`."""
        if not first:
            return self
        moved = (
            slice(self.rows.start - first, self.rows.stop - first)
            if isinstance(self.rows, slice)
            else self.rows - first
        )
        return Block(self.clients, self.grads, self.losses, moved, first, self.start_grads)

    @property
    def gradients(self) -> Tensor:
        """The clients' gradients at x, ``[c, d]``."""
        return self.grads if self.start_grads is None else self.start_grads

    @property
    def row_numbers(self) -> Tensor:
        """`rows` as a tensor of numbers on the host."""
        return self.clients - self.first


def copies_of(engine: Engine) -> Sequence[nn.Module]:
    """Return the copies of the model that an engine calls in place of the problem's, if it has any."""
    found: Sequence[nn.Module] = getattr(engine, "copies", ())
    return found


class GradientTable:
    """Memory for the gradients ``[c, d]`` of a block, which the next block uses again."""

    def __init__(self) -> None:
        self._rows = torch.empty(0, 0)

    def rows(self, x: Tensor, count: int) -> Tensor:
        """Return `count` rows like x, whose values are left over from earlier blocks."""
        if len(self._rows) < count or self._rows.dtype != x.dtype:
            self._rows = x.new_empty(count, len(x))
        return self._rows[:count]


class Engine(Protocol):
    """Computes gradients in blocks of clients, so that no [n, d] matrix of gradients is needed."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> int:
        """The number of CPU threads that suits this work."""
        ...

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        """Yield the gradients of `clients` (sorted, on the host; None: all) on their batches of `round`.

        Engines of clients with local steps yield updates instead of gradients, except with `full`.

        Buffers are updated in place, row by row; pass a clone to keep them unchanged.
        """
        ...


class BlockEngine:
    """The base of the engines of this package; `_block` is the size of a block, in clients or in records."""

    name: str
    _block: int

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return f"{self.name}, blocks of {self._block}"

    @property
    def threads(self) -> int:
        """The number of CPU threads that suits this work."""
        return torch.get_num_threads()

    def shrink(self) -> bool:
        """Make blocks smaller after running out of memory; returns False if they cannot be smaller."""
        self._block //= 2
        return self._block > 0
