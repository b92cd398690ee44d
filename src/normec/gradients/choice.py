"""Which engine computes a problem's gradients."""

from __future__ import annotations

import logging
from typing import Literal, cast

from torch import nn

from ..errors import UsageError, one_of
from ..problems.client_data import ResidentRecords
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.batches import Batches, BatchSource
from .batched import BatchedEngine
from .compiled import CompiledEngine, pays_back
from .engine import Engine
from .linear import LinearEngine, fits
from .loop import LoopEngine
from .precision import Precision
from .record_clip import RecordClip
from .shared.engine import SharedEngine
from .shared.rules import NoRule
from .verified_engine import FastEngine, VerifiedEngine

ENGINES = ("auto", "loop", "compiled", "batched", "shared", "linear")

# Parameters × records of a client's batch above which convolutions keep a CPU busy client by client.
_HEAVY = 3e6


Kind = Literal["compiled", "batched", "shared", "linear"]


def choose_engine(
    name: str | Engine,
    problem: Objective,
    batches: BatchSource | None,
    seed: int,
    record_clip: RecordClip | None = None,
    precision: Precision = "tf32",
    rounds: int = 1,
    private: bool = False,
) -> Engine:
    """The engine of that name; "auto" takes the fastest that fits so many rounds. One's own is taken as it is.

    With `private` the choice depends on types and sizes alone, never on the clients' data, and no code of the caller's
    own sees the records of several clients together.
    """
    if not isinstance(name, str):
        if record_clip is not None:
            raise UsageError("record_clip needs an engine of ours, by name; an engine of one's own may not clip")
        return name
    one_of(ENGINES, engine=name)
    loop = LoopEngine(problem, batches, seed, record_clip, precision)
    if name == "loop":
        return loop
    if not isinstance(problem, Problem) or not isinstance(problem.records, ResidentRecords):
        return _instead(name, loop, "it needs a model and its records in tensors")
    if private and type(problem) is not Problem:
        return _instead(name, loop, f"{type(problem).__name__} may override what the engines compute")
    kinds: tuple[Kind, ...]
    if name in ("auto", "linear") and fits(problem):
        kinds = ("linear",)
    elif name == "linear":
        raise UsageError("the linear engine is for softmax and logistic regression on tensors, without augmentation")
    elif record_clip is not None:
        return _instead(name, loop, "only the loop clips record by record")
    elif batches is not None and not isinstance(batches, Batches):
        return _instead(name, loop, "batches of one's records drawn by coins differ in length from client to client")
    elif name != "auto":
        kinds = (cast(Kind, name),)
    elif problem.x0.is_cuda or _light(problem, loop):
        kinds = ("shared", "batched")
    elif pays_back(problem, float(loop.divisors.mean()), rounds):
        kinds = ("compiled",)
    else:
        return loop
    why = ""
    for kind in kinds:

        def make(of: Problem, precision: Precision, kind: Kind = kind) -> FastEngine:
            compiling = of is problem  # what is compiled is checked as it is, for compiling twice takes twice the time
            return _fast(kind, of, batches, seed, record_clip, precision, private, compiling)

        try:
            drawn = (type(batches).__name__, float(batches.expected.sum())) if batches is not None else None
            return VerifiedEngine(problem, make, loop, (kind, precision, record_clip, drawn, private), private)
        except NoRule as reason:
            why = str(reason)
    return _instead(name, loop, why)


def _fast(
    kind: Kind,
    problem: Problem,
    batches: BatchSource | None,
    seed: int,
    record_clip: RecordClip | None,
    precision: Precision,
    private: bool,
    compiling: bool,
) -> FastEngine:
    """The engine of that kind for the run's problem, or for a copy to compare engines on."""
    records = problem.records
    if not isinstance(records, ResidentRecords):
        raise TypeError("records that were resident are so in every precision")
    if kind == "linear":
        return LinearEngine(problem, records, batches, record_clip)
    if batches is not None and not isinstance(batches, Batches):
        raise TypeError("batches of other kinds are left to the loop")
    match kind:
        case "shared":
            return SharedEngine(problem, records, batches, seed, precision, private=private)
        case "batched":
            return BatchedEngine(problem, records, batches, seed, precision)
        case _:
            return CompiledEngine(problem, records, batches, seed, precision, compiling=compiling)


def _light(problem: Problem, loop: LoopEngine) -> bool:
    """Whether a client's gradient is so little work that a CPU gains by doing many at once."""
    convolves = any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in problem.model.modules())
    return not convolves or len(problem.x0) * float(loop.divisors.mean()) < _HEAVY


def _instead(name: str, loop: LoopEngine, reason: str) -> LoopEngine:
    if name != "auto":
        logging.getLogger("normec").warning("engine %s is not used, the loop is: %s", name, reason)
    return loop
