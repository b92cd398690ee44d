"""Which engine computes a problem's gradients."""

from __future__ import annotations

from ..errors import UsageError, one_of
from ..objective import Objective
from ..problem import Problem
from ..records import ResidentRecords
from ..sampling import BatchSource
from .engine import Engine
from .linear import Linear, fits
from .loop import Loop

ENGINES = ("auto", "loop", "linear")


def choose(
    name: str | Engine, problem: Objective, batches: BatchSource | None, seed: int, record_clip: float | None = None
) -> Engine:
    """The engine of that name; "auto" takes the fastest that fits. An engine of one's own is taken as it is."""
    if not isinstance(name, str):
        if record_clip is not None:
            raise UsageError("record_clip needs an engine of ours, by name; an engine of one's own may not clip")
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
