"""The one interface of gradient engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import UsageError, one_of
from ..problem import Buffers, Objective, Problem
from ..records import ResidentRecords
from ..sampling import BatchSource

ENGINES = ("auto", "loop", "linear")


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


def choose(
    name: str | Engine, problem: Objective, batches: BatchSource | None, seed: int, record_clip: float | None = None
) -> Engine:
    """The engine of that name; "auto" takes the fastest that fits. An engine of one's own is taken as it is."""
    from .linear import Linear, fits
    from .loop import Loop

    if not isinstance(name, str):
        return name
    one_of(ENGINES, engine=name)
    if (
        name != "loop"
        and isinstance(problem, Problem)
        and isinstance(problem.records, ResidentRecords)
        and fits(problem)
    ):
        return Linear(problem, problem.records, batches, record_clip)
    if name == "linear":
        raise UsageError("the linear engine is for softmax and logistic regression on tensors, without augmentation")
    return Loop(problem, batches, seed, record_clip)
