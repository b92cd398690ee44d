"""The one interface of gradient engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import one_of
from ..problem import Buffers, Objective
from ..sampling import Batches

ENGINES = ("auto", "loop")


@dataclass(frozen=True)
class Block:
    """The gradients ``[c, d]`` and losses ``[c]`` of some clients (their numbers, sorted)."""

    clients: Tensor
    grads: Tensor
    losses: Tensor


class Engine(Protocol):
    """Computes gradients in blocks of clients, so that no [n, d] matrix of gradients need exist."""

    name: str

    @property
    def threads(self) -> int:
        """How many of the CPU's threads suit this work."""
        ...

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        """Gradients of `clients` (None: all) on their batches of `round`; `full`: on all their records.

        Buffers are updated in place, row by row; pass a clone to look without touching.
        """
        ...


def choose(name: str, problem: Objective, batches: Batches | None, seed: int) -> Engine:
    """The engine of that name; "auto" takes the fastest that fits the problem."""
    from .loop import Loop

    one_of(ENGINES, engine=name)
    return Loop(problem, batches, seed)
