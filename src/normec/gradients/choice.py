"""The choice of the engine that computes a problem's gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, cast

from torch import nn

from ..algorithms.local_steps import LocalSteps
from ..errors import UsageError, one_of
from ..problems.client_data import ResidentRecords
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.batches import Batches, BatchSource
from .batched import BatchedEngine
from .compiled import CompiledEngine, operations, operations_by_kind, pays_back
from .engine import Engine
from .linear import LinearEngine, fits
from .local_steps import LocalEngine, LocalLoop, OneByOne, steps_of
from .loop import LoopEngine
from .precision import Precision
from .record_clip import RecordClip
from .recorded import RecordedEngine
from .shared.compiled import Compilation
from .shared.engine import SharedEngine
from .shared.operations import OperationModel
from .shared.rules import ModuleModel
from .shared.slots import NoRule
from .verified_engine import FastEngine, VerifiedEngine

ENGINES = ("auto", "loop", "compiled", "recorded", "batched", "shared", "linear")

# Above these numbers one client keeps a CPU busy: parameters × records per batch of a model with convolutions that the
# clients share, operations of a gradient if every client has convolutions of its own, and operations of a gradient
# without convolutions. (A GPT with 10¹⁰ operations for each of ten clients takes a sixth longer in one pass than client
# by client.)
_HEAVY = 3e6
_HEAVY_LOCAL = 1e8
_HEAVY_PRODUCTS = 2e9
# The most clients that a GPU computes one after the other, in a recording, instead of all at once by vmap.
_FEW = 128
# Rough constants, so that the choice is always the same: the operations per second of a GPU in a pass that is
# compiled, the time that this saves, as a share of the pass, and the seconds that it takes. (A GPT of 0.8 million
# parameters on an H200: 6e13, 0.4 in TF32 and 0.8 in bfloat16, and 10 to 19 s.)
_GPU_RATE, _GPU_SAVED, _GPU_COMPILING = 6e13, 0.5, 30.0
# Records in a batch on which engines that clip every record are compared: the loop clips them a few at a time.
_CLIPPED = 512


Kind = Literal[
    "compiled", "compiled shared", "compiled operations", "recorded", "batched", "shared", "operations", "linear"
]
_SHARED: tuple[Kind, ...] = ("shared", "operations")  # rules by module, and where these do not suit by operation
_COMPILED: tuple[Kind, ...] = ("compiled shared", "compiled operations")


def choose_engine(
    name: str | Engine,
    problem: Objective,
    batches: BatchSource | None,
    seed: int,
    record_clip: RecordClip | None = None,
    precision: Precision = "tf32",
    rounds: int = 1,
    private: bool = False,
    local: LocalSteps | None = None,
    contained: bool = False,
    drawn: int | None = None,
) -> Engine:
    """Return the engine of that name; "auto" is the fastest that suits the problem. A custom engine is used unchanged.

    With `local` the engine yields updates by local steps, with the gradients of the engine of that name.

    With `private` the choice depends on types and sizes alone, never on the clients' data, and no code of the caller's
    own sees the records of several clients together, or keeps anything of one client for another (`restored`).

    With `contained` clipped records are computed by the loop, in which the bits of one record's share do not depend on
    the others. In the other engines one record may change how the sum of the others is rounded, by a little that no
    proof bounds; this is good enough for simulations, whose noise protects nobody. `seed` is then a secret.

    `drawn` is the number of clients in every round, 0 if it varies, and None for all of them.
    """
    if not isinstance(name, str):
        if record_clip is not None:
            raise UsageError(
                "record_clip needs an engine by name, such as 'auto'; a custom engine may not clip records"
            )
        if local is None:
            return name
        return LocalEngine(OneByOne(name, len(problem.x0)), local, steps_of(local, problem, batches))
    one_of(ENGINES, engine=name)
    # The order of records decides about their masks, so these must be secret where records are protected.
    secret = record_clip is not None and contained
    gradients = LoopEngine(problem, batches, seed, record_clip, precision, secret=secret, private=private)
    steps = steps_of(local, problem, batches) if local is not None else None
    loop = LocalLoop(gradients, problem, local, steps) if local is not None and steps is not None else gradients
    if name == "loop":
        return loop
    if secret:
        return _fall_back(name, loop, "with real noise, only the loop keeps the records apart to the last bit")
    if not isinstance(problem, Problem) or not isinstance(problem.records, ResidentRecords):
        return _fall_back(name, loop, "it needs a model, and records in tensors")
    if private and type(problem) is not Problem:
        return _fall_back(name, loop, f"{type(problem).__name__} may override what the engines compute")
    if local is not None and name == "shared":
        return _fall_back(name, loop, "after the first local step every client has a model of its own")
    kinds: tuple[Kind, ...]
    if name in ("auto", "linear") and fits(problem):
        kinds = ("linear",)
    elif name == "linear":
        raise UsageError("the linear engine is for softmax and logistic regression on tensors, without augmentation")
    elif record_clip is not None:
        fixed = problem.x0.is_cuda and (batches is None or isinstance(batches, Batches))
        if local is not None or name not in ("auto", "shared", *(["compiled"] if fixed else [])):
            return _fall_back(name, loop, "only the shared pass, the linear engine and the loop clip record by record")
        worth = fixed and name == "auto" and _worth_compiling(problem, float(loop.divisors.mean()), drawn, rounds)
        kinds = (*_COMPILED, *_SHARED) if worth or name == "compiled" else _SHARED
    elif batches is not None and not isinstance(batches, Batches):
        return _fall_back(name, loop, "Poisson batches differ in length from client to client")
    elif name == "compiled" and problem.x0.is_cuda and local is None:
        kinds = (*_COMPILED, *_SHARED)
    elif name != "auto":
        kinds = _SHARED if name == "shared" else (cast(Kind, name),)
    elif problem.x0.is_cuda and local is None:
        compiled = _COMPILED if _worth_compiling(problem, float(loop.divisors.mean()), drawn, rounds) else ()
        kinds = (*compiled, *_SHARED, "recorded" if _one_by_one(problem) else "batched")
    elif problem.x0.is_cuda or _light(problem, gradients, local is not None):
        kinds = (*_SHARED, "batched") if local is None else ("batched",)
    elif _convolves(problem) and pays_back(
        problem, float(loop.divisors.mean()), rounds if steps is None else rounds * int(steps.double().mean())
    ):
        kinds = ("compiled",)
    else:
        return loop

    def make(kind: Kind, of: Problem, precision: Precision) -> FastEngine:
        # The copy that engines are compared on in float64 stays uncompiled, to compile only once. Nothing is recorded
        # of a copy, which would also say a second time why it cannot be.
        compiling, recording = of is problem or (of.x0.is_cuda and of.x0.dtype == problem.x0.dtype), of is problem
        # The copy in a private run may have fewer records.
        own = batches if batches is None or of is problem or of.sizes is None else batches.of(of.sizes)
        fast = _fast(
            kind, of, own, seed, record_clip, precision, private, compiling, recording, local is not None, drawn
        )
        if local is None or steps is None:
            return fast
        points = fast if isinstance(fast, BatchedEngine | LinearEngine) else OneByOne(fast, len(of.x0))
        return LocalEngine(points, local, steps)

    reasons: list[str] = []

    def first_of(kinds: Sequence[Kind]) -> VerifiedEngine | LoopEngine | LocalLoop:
        """Return the first engine that the model suits; if it fails its comparison, the next one is tried."""
        lengths = (type(batches).__name__, float(batches.expected.sum())) if batches is not None else None
        most = math.ceil(_CLIPPED / _share_in_a_batch(problem, batches)) if record_clip is not None else None
        for position, kind in enumerate(kinds, start=1):
            known = (kind, precision, record_clip, lengths, private, local, drawn if kind in _COMPILED else None)
            others = partial(first_of, kinds[position:])
            try:
                return VerifiedEngine(problem, partial(make, kind), loop, known, private, others, most, drawn)
            except NoRule as reason:
                reasons.append(str(reason))
        return loop

    found = first_of(kinds)
    return found if found is not loop else _fall_back(name, loop, reasons[-1])


def _fast(
    kind: Kind,
    problem: Problem,
    batches: BatchSource | None,
    seed: int,
    record_clip: RecordClip | None,
    precision: Precision,
    private: bool,
    compiling: bool,
    recording: bool,
    local: bool,
    drawn: int | None,
) -> LinearEngine | SharedEngine | BatchedEngine | RecordedEngine | CompiledEngine:
    """Return the engine of that kind for the run's problem, or for a copy to compare engines on."""
    records = problem.records
    if not isinstance(records, ResidentRecords):
        raise TypeError("resident records stay resident in every precision")
    if kind == "linear":
        return LinearEngine(problem, records, batches, record_clip, private=private)
    if kind in _SHARED:
        rules = ModuleModel if kind == "shared" else OperationModel
        return SharedEngine(problem, records, batches, seed, precision, rules, private=private, record_clip=record_clip)
    if batches is not None and not isinstance(batches, Batches):
        raise TypeError("other kinds of batches need the loop")
    match kind:
        case "compiled shared" | "compiled operations":
            rules = ModuleModel if kind == "compiled shared" else OperationModel
            compilation = Compilation(drawn, compiling, every=not compiling)
            given = problem, records, batches, seed, precision, rules
            return SharedEngine(*given, private=private, record_clip=record_clip, compilation=compilation)
        case "recorded":
            return RecordedEngine(problem, records, batches, seed, precision, private=private, recording=recording)
        case "batched":
            return BatchedEngine(problem, records, batches, seed, precision, local=local, private=private)
        case _:
            return CompiledEngine(problem, records, batches, seed, precision, compiling=compiling, private=private)


def _share_in_a_batch(problem: Problem, batches: BatchSource | None) -> float:
    """Return about which share of the clients' records is in a batch."""
    if batches is None or problem.sizes is None:
        return 1.0
    return float(batches.expected.sum() / problem.sizes.sum())


def _light(problem: Problem, loop: LoopEngine, local: bool) -> bool:
    """Whether a client's gradient is so little work that a CPU gains by computing many at once.

    Clients with models of their own (`local`) share no convolution, so the operations of each are counted.
    """
    records = float(loop.divisors.mean())
    small = len(problem.x0) * records < _HEAVY
    if not _convolves(problem):
        return local or small or operations(problem) * records < _HEAVY_PRODUCTS
    return operations(problem) * records < _HEAVY_LOCAL if local else small


def _convolves(problem: Problem) -> bool:
    """Whether the model has convolutions of images; without them, compiling gains nothing on a CPU."""
    return any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in problem.model.modules())


def _worth_compiling(problem: Problem, records: float, drawn: int | None, rounds: int) -> bool:
    """Whether compiling the pass of all clients saves a GPU more time than it takes, as far as operations tell.

    Convolutions have kernels of our own or of cuDNN, and compiling them gains nothing; a recurrent layer would be
    compiled step by step.
    """
    if any(isinstance(module, nn.RNNBase) for module in problem.model.modules()):
        return False
    counts = operations_by_kind(problem)
    if 2 * sum(count for kind, count in counts.items() if "convolution" in kind) > sum(counts.values()):
        return False
    clients = problem.clients if drawn is None else drawn
    seconds = sum(counts.values()) * records * clients * rounds / _GPU_RATE
    return bool(seconds * _GPU_SAVED > _GPU_COMPILING)


def _one_by_one(problem: Problem) -> bool:
    """Whether a GPU takes one client after the other: few clients, or modules that vmap cannot do."""
    drawing = nn.modules.dropout._DropoutNd, nn.RNNBase
    return problem.clients <= _FEW or any(isinstance(module, drawing) for module in problem.model.modules())


def _fall_back(name: str, loop: LoopEngine | LocalLoop, reason: str) -> Engine:
    if name != "auto":
        logging.getLogger("normec").warning("engine %s is not used; the loop runs instead: %s", name, reason)
    return loop
