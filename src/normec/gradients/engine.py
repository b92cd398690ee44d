"""The one interface of gradient engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..objective import Buffers


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
