"""`train`: validate the arguments and run the training loop."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch

from ..algorithms.method import Method, Steps, may_round
from ..algorithms.registry import identity_of
from ..errors import UsageError, at_least, non_negative, one_of
from ..gradients.precision import PRECISIONS, Precision, products
from ..problems.functions import FunctionProblem
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.batches import rounds_of
from ..sampling.participation import Everyone, FixedSize, Participation, Poisson, known_participation
from ..storage.checkpoint import SECRET
from ..storage.history import NOT_COVERED
from ..storage.run_folder import RunStorage, kept_secret
from .callbacks import Callback
from .communicator import Alone, World, agree
from .independence import refuse_coupled_clients, refuse_mixing_methods
from .loop import TrainingLoop
from .memory_table import Home, MemoryTable
from .run import (
    WATCHING,
    InitialMemory,
    Plan,
    Run,
    Schedule,
    State,
    batches_of,
    usual_evaluate_every,
    usual_log_every,
)
from .settings_used import settings_used

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism
    from ..privacy.setting import Setting
    from ..privacy.statement import Privacy

__all__ = ["Plan", "Run", "State", "prepare", "train"]

Given = ParamSpec("Given")
RECORDED = (
    "the run recorded the clients' losses, gradient norms, memory errors and message norms without noise "
    f"(diagnostics = true): they are {NOT_COVERED}"
)


def prepare(
    problem: Objective,
    method: Method,
    *,
    lr: float | Schedule | Literal["theory"],
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    batch_rate: float | None = None,
    warmup: int = 0,
    privacy: Privacy | None = None,
    public_sizes: bool = False,
    seed: int | None = None,
    participation: Participation | None = None,
    initial_memory: InitialMemory = "zero",
    log_every: int | None = None,
    evaluate_every: int | None = None,
    full_gradient: bool = False,
    diagnostics: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
    precision: Precision = "tf32",
    memory_dtype: torch.dtype | None = None,
    memory_home: Home = "device",
    out: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    witness: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
) -> TrainingLoop:
    """Minimise `problem` by `method`: x ← x − lr · direction, once a round.

    A round is one message of each client that takes part. Give `rounds`, or `epochs` of the average
    client's records. `batch_size=None` takes full local gradients; `batch_rate` takes Poisson batches instead,
    each record by its own coin. `lr` may be a function of the round, which is asked for all rounds before the first
    one, or "theory" for the step size with the best guarantee (`normec.theory`); it is 0 in the first `warmup` rounds.
    `initial_memory`: g_i⁰ is zero, the first gradient, or a tensor ``[d]`` or ``[n, d]``; ĝ⁰ = mean g_i⁰.

    A row of history is taken every `log_every` rounds (default: about 500 in all), with the test set every
    `evaluate_every` (default: about 20 times). `full_gradient` records the exact f, ‖∇f‖ and memory error
    even where training uses batches or samples clients, at the cost of a pass over all data a row.

    With `privacy` every message leaves with noise, calibrated for all rounds, and paid for in a ledger; what no
    rule covers is refused before anything is computed. `run.privacy` says what was spent. With `batch_size`,
    `epochs` make the rounds depend on how many records the clients hold: where clients are protected, give `rounds`,
    or declare these numbers public with `public_sizes`.

    The history of a private run holds only what the guarantee covers: rounds, messages, bytes, ε, and results on test
    and validation data. `diagnostics=True` adds the clients' losses, gradient norms, memory errors and message norms,
    measured without noise, and `run.clients`; the guarantee does not cover them. A run without privacy always has them.

    `engine` says how gradients are computed (`gradients.choice`), `precision` how finely a GPU multiplies ("float32",
    "tf32", or "bf16" for forward and backward passes); x and messages keep their dtype. The table of memories may be
    kept in bfloat16, and in host memory or on disk where it outgrows the device.

    With `out` the run lives in a folder: killed at any instant, the same call goes on from its last
    checkpoint to the same numbers. The same seed gives the same bits on the same machine, whatever is
    logged, evaluated or interrupted; it defaults to 0. Private runs of different settings share no noise. A private run
    without a given seed draws its noise, and the coins that decide who takes part, from a fresh secret, which only its
    folder keeps. The folder's config.toml holds every setting with the value that is used.

    `witness` is a file in another folder, one for each run, that counts the lines of the ledger too. A folder that was
    restored to an older state, or deleted and begun anew, has forgotten releases, and is refused with it.

    Ctrl-C ends the run after the current round, with a checkpoint.

    `world` spreads the clients over processes (`normec.distributed.join`): every rank makes the same call, and each
    returns the same run; rank 0 writes, and calls the callbacks.
    """
    world = world or Alone()
    rounds, epochs, batch_size, seed = (_plain(number) for number in (rounds, epochs, batch_size, seed))
    log_every, evaluate_every, warmup = (_plain(number) for number in (log_every, evaluate_every, warmup))
    privacy = privacy.with_noise("seeded") if privacy is not None else None
    at_least(0, seed=seed or 0)
    _check_method(method)
    one_of(PRECISIONS, precision=precision)
    non_negative(checkpoint_seconds=checkpoint_seconds)
    if isinstance(lr, str):
        one_of(("theory",), lr=lr)
    elif not callable(lr):
        lr = float(lr)
        non_negative(lr=lr)
    if not isinstance(initial_memory, str):
        initial_memory = torch.as_tensor(initial_memory)
    at_least(0, warmup=warmup)
    if rounds is not None and 0 < rounds <= warmup:
        raise UsageError(f"warmup must be below the {rounds} rounds, got {warmup}; x would never move")
    _check_batches(problem, batch_size, batch_rate)
    problem = _moved(problem, torch.device(device) if device is not None else problem.x0.device, dtype)
    counted = epochs is not None and batch_size is not None  # the rounds follow from the clients' sizes
    if privacy is not None and counted:
        privacy.refuse_private_sizes(public_sizes)
    total = _horizon(problem, rounds, epochs, batch_size)
    if isinstance(lr, str):
        sampled = batch_size or batch_rate or participation
        lr = _lr_by_theory(problem, method, total, sampled, privacy, warmup, initial_memory)
    plan = Plan(
        lr=_scheduled(lr, total) if callable(lr) else lr,
        rounds=total,
        batch_size=batch_size,
        batch_rate=batch_rate,
        warmup=warmup,
        seed=seed or 0,
        secret=_secret(privacy, seed, out, world),
        participation=_participation(participation, privacy),
        initial_memory=initial_memory,
        log_every=log_every if log_every is not None else usual_log_every(total),
        evaluate_every=evaluate_every if evaluate_every is not None else usual_evaluate_every(total),
        full_gradient=full_gradient,
        diagnostics=diagnostics or privacy is None,
        precision=precision,
        memory=MemoryTable(None if memory_dtype == problem.x0.dtype else memory_dtype, memory_home),
    )
    at_least(1, log_every=plan.log_every, evaluate_every=plan.evaluate_every)
    if full_gradient and not plan.diagnostics:
        raise UsageError(
            "full_gradient=True measures losses and gradients without noise, which privacy does not cover; "
            "add diagnostics=True to record them all the same, or leave full_gradient out"
        )
    rounded = plan.memory.dtype is not None and Steps(method, problem.x0).stateful
    if rounded and not may_round(method):
        raise UsageError(
            f"memory_dtype is for memories made of messages alone; {method.name} keeps its states in the model's "
            f"{problem.x0.dtype}"
        )
    if witness is not None and (privacy is None or out is None):
        raise UsageError(
            "witness watches over the ledger of a private run in a folder; give privacy and out, or drop it"
        )
    plan.drawn(problem.clients, 0)  # refuses what cannot be drawn, before anything starts
    mechanism = None
    if privacy is not None:
        notes = _assumptions(problem, privacy, plan, counted, own_engine=not isinstance(engine, str))
        mechanism = _mechanism(problem, method, plan, privacy, notes, Path(witness) if witness is not None else None)
        if isinstance(problem, Problem):
            _refuse_shared_records(problem, privacy, plan.diagnostics)
        # Before anything else runs the caller's code, which may keep what it saw first.
        refuse_mixing_methods(method, len(problem.x0))
        refuse_coupled_clients(problem, plan.seed, privacy.record_clip)
    kept, identity = out is not None, {}
    if kept or world.size > 1:  # else nobody asks, and checksums of large data take their time
        identity = {
            "method": identity_of(method),
            "dtype": str(problem.x0.dtype),
            "privacy": privacy.to_dict() if privacy is not None else None,
            SECRET: _digest(plan.secret) if plan.secret is not None else None,
            **plan.identity(),
            **({"diagnostics": plan.diagnostics} if privacy is not None else {}),
            **problem.fingerprint(),
        }
    if world.size > 1:
        _spread(world, problem.clients, {**identity, "device": problem.x0.device.type, "out": str(out)})
    storage = RunStorage(Path(out) if out is not None and world.rank == 0 else None, identity, plan.secret)
    watching = callbacks if world.rank == 0 else ()
    loop = TrainingLoop(problem, method, plan, engine, storage, checkpoint_seconds, watching, mechanism, world, kept)
    if storage.out is not None:
        storage.settings = settings_used(problem, method, plan, privacy, loop.engine.name, checkpoint_seconds, witness)
    return loop


def _scheduled(lr: Schedule, rounds: int) -> tuple[float, ...]:
    """The step sizes of all rounds, asked for before any data are seen: x depends on the data by messages alone."""
    sizes = tuple(float(lr(k)) for k in range(rounds))
    for k, size in enumerate(sizes):
        if not (math.isfinite(size) and size >= 0):
            raise UsageError(f"lr must be >= 0 and finite, got {size} in round {k}")
    return sizes


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        raise UsageError(f"method must be a normec.Method, such as normec.NormEC(0.01, 0.1), got {method!r}")


def _plain(number: Any) -> Any:
    """NumPy's whole numbers as Python's, which files and seeds take; everything else as it is."""
    return int(number) if type(number) is not bool and isinstance(number, Integral) else number


def _moved(problem: Objective, device: torch.device, dtype: torch.dtype | None) -> Objective:
    """On that device and in that precision; where it is so already, itself: what is known of it is known still."""
    there = problem.x0.device
    near = device.type == there.type and device.index in (None, there.index)
    return problem if near and dtype in (None, problem.x0.dtype) else problem.to(device, dtype)


def _secret(privacy: Privacy | None, seed: int | None, out: str | Path | None, world: World) -> int | None:
    """The secret behind seeded noise and sampling where no seed was given: the folder's, or a fresh one."""
    if privacy is None or privacy.noise != "seeded" or seed is not None:
        return None
    return world.first(lambda: (kept_secret(Path(out)) if out is not None else None) or secrets.randbits(128))


def _digest(secret: int) -> str:
    """What a checkpoint knows the secret by: 64 bits of a hash, which do not give away the 128 that went in."""
    return hashlib.sha256(f"noise secret {secret:032x}".encode()).hexdigest()[:16]


def _spread(world: World, clients: int, identity: dict[str, Any]) -> None:
    """Refuse what cannot be spread over ranks; every rank says the same."""
    agree(world, identity)
    if clients < world.size:
        raise UsageError(
            f"{clients} clients on {world.size} ranks leave {world.size - clients} ranks without data; "
            f"start at most {clients}"
        )


@contextmanager
def ready(precision: Precision) -> Iterator[None]:
    """torch as runs of that precision want it; left as it was found."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(), products(precision):
            yield
    finally:
        torch.set_num_threads(threads)


def _to_its_end(prepare: Callable[Given, TrainingLoop]) -> Callable[Given, Run]:
    @functools.wraps(prepare)
    def train(*args: Given.args, **kwargs: Given.kwargs) -> Run:
        rounds = prepare(*args, **kwargs)
        with ready(rounds.plan.precision):
            return rounds.run()

    train.__name__ = train.__qualname__ = "train"
    train.__signature__ = inspect.signature(prepare).replace(return_annotation="Run")  # type: ignore[attr-defined]
    return train


# Takes what `prepare` takes, and returns when the run has ended.
train = _to_its_end(prepare)


def _horizon(problem: Objective, rounds: int | None, epochs: int | None, batch_size: int | None) -> int:
    if (rounds is None) == (epochs is None):
        raise UsageError(f"give rounds or epochs, one of them, got rounds={rounds} and epochs={epochs}")
    if rounds is not None:
        at_least(1, rounds=rounds)
        return rounds
    if problem.sizes is None:
        raise UsageError("epochs need records; a problem of plain functions takes rounds")
    return rounds_of(epochs or 0, problem.sizes, batch_size)


def _refuse_shared_records(problem: Problem, privacy: Privacy, diagnostics: bool) -> None:
    """Refuse records that count more often than the account has it, or whose losses would be told without noise."""
    if privacy.unit == "record" and problem.repeated:
        raise UsageError(
            "a record stands more than once among the clients' records, and unit='record' accounts for one of each; "
            "give every record to one client, once, or protect whole clients"
        )
    if problem.shown and not diagnostics:
        raise UsageError(
            f"the {problem.shown[0]} set holds records of the clients, and its results are told without noise; give "
            "records that no client holds, or add diagnostics=True"
        )


def _check_batches(problem: Objective, batch_size: int | None, batch_rate: float | None) -> None:
    if batch_size is not None and batch_rate is not None:
        raise UsageError("give batch_size or batch_rate, not both")
    if batch_size is not None:
        at_least(1, batch_size=batch_size)
    if problem.sizes is None and (batch_size is not None or batch_rate is not None):
        raise UsageError(f"plain functions have no records to take a batch of, got {batch_size or batch_rate}")


def _participation(given: Participation | None, privacy: Privacy | None) -> Participation:
    """Who takes part; the sampling that a privacy statement claims is the sampling that happens."""
    claimed = Poisson(privacy.sampling) if privacy is not None and privacy.sampling is not None else None
    if claimed is not None and given is not None and given != claimed:
        raise UsageError(f"privacy claims clients sampled by {claimed}, but participation is {given}; give one of them")
    return claimed or given or Everyone()


def _mechanism(
    problem: Objective,
    method: Method,
    plan: Plan,
    privacy: Privacy,
    notes: tuple[str, ...],
    witness: Path | None,
) -> Mechanism:
    from ..privacy.mechanism import Mechanism
    from ..privacy.setting import FULL, Sampling, Setting

    batches = batches_of(problem, plan)
    if problem.x0.dtype in (torch.float16, torch.bfloat16):
        raise UsageError(f"{problem.x0.dtype} rounds messages over their bound; private runs take float32 or float64")
    if privacy.noise != "seeded" and (privacy.sampling is not None or plan.batch_rate is not None):
        raise UsageError(
            f"with noise={privacy.noise!r} no gain from sampling is claimed: the coins come from the run's seed, "
            "which is no secret; drop sampling and batch_rate"
        )
    if plan.memory.dtype is not None:
        raise UsageError(
            f"memory_dtype={str(plan.memory.dtype).removeprefix('torch.')} rounds memories, and messages rounded alike "
            f"would leave their bound; private runs keep their memories in the model's {problem.x0.dtype}"
        )
    if privacy.record_clip is not None:
        if problem.sizes is None:
            raise UsageError("record_clip needs records; plain functions have none")
        if plan.batch_size is not None:
            raise UsageError("record_clip goes with full local gradients or batch_rate, not with batch_size")
        if problem.augment is not None:
            raise UsageError("record_clip does not go with augmentation yet; leave one of them out")
    match plan.participation:
        case Poisson(rate):
            clients = Sampling(rate, "poisson", amplify=privacy.sampling is not None)
        case FixedSize(count):
            clients = Sampling(count / problem.clients, "fixed", amplify=False)
        case _:
            clients = FULL
    divisors = problem.sizes if batches is None else batches.expected
    setting = Setting(
        clients=problem.clients,
        rounds=plan.rounds,
        sampling=clients,
        batch=Sampling(plan.batch_rate) if plan.batch_rate is not None else FULL,
        records=float(divisors.min()) if divisors is not None else None,
        dimension=len(problem.x0),
        buffers=problem.statistics,
        start="gradients" if isinstance(plan.initial_memory, str) and plan.initial_memory == "gradient" else "public",
    )
    name = noise_name(method, privacy, plan, setting)
    return Mechanism(privacy, method, setting, plan.coins, name, notes, witness=witness)


def noise_name(method: Method, privacy: Privacy, plan: Plan, setting: Setting) -> str:
    """The name of a run's seeded noise: runs that differ in anything public share none of it.

    Neither the engine, the device nor what is logged is part of it: the same run has the same noise.
    """
    public = {name: value for name, value in plan.identity().items() if name not in WATCHING}
    public |= {"method": identity_of(method), "privacy": privacy.to_dict()}
    public |= {"clients": setting.clients, "dimension": setting.dimension}
    return hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16]


def _assumptions(problem: Objective, privacy: Privacy, plan: Plan, counted: bool, own_engine: bool) -> tuple[str, ...]:
    """What this run takes for granted, for its report. `counted`: the rounds follow from the clients' sizes."""
    notes = []
    if not isinstance(plan.initial_memory, str):
        notes.append("the given initial memory is taken as public")
    if counted and privacy.unit == "client":
        notes.append("how many records the clients hold is taken as public: the rounds follow from it")
    if plan.diagnostics:
        notes.append(RECORDED)
    if isinstance(problem, Problem) and problem.shown:
        notes.append(f"the {problem.shown[0]} set holds records of the clients: results on it are {NOT_COVERED}")
    if own_engine:
        notes.append("the gradients come from an engine of the caller's own; nothing checks that it parts the clients")
    if type(problem) not in (Problem, FunctionProblem):
        notes.append(
            f"the clients' losses come from the caller's own class {type(problem).__name__}; "
            "nothing but a few gradients at the start shows that it parts the clients"
        )
    if not known_participation(plan.participation):
        notes.append(
            f"the caller's own rule {type(plan.participation).__name__} decides who takes part; "
            "nothing checks that it does not look at the clients' data"
        )
    return tuple(notes)


def _lr_by_theory(
    problem: Objective,
    method: Method,
    rounds: int,
    sampled: object,
    privacy: Privacy | None,
    warmup: int,
    initial_memory: InitialMemory,
) -> float:
    """The step size with the best guarantee; the theorems are about full gradients of all clients."""
    from ..theory import step_size

    if sampled is not None:
        raise UsageError(
            "lr='theory' is for full gradients of all clients; drop the batches or the sampling, or give lr"
        )
    if privacy is not None:
        raise UsageError(
            "lr='theory' reads L and the first gradients from the data without noise, which privacy does not cover; "
            "plan on public data (`normec theory plan`) and give lr as a number"
        )
    if not isinstance(initial_memory, str):
        raise UsageError("lr='theory' needs initial_memory 'zero' or 'gradient'")
    return step_size(problem, method, rounds, warmup=warmup, start=initial_memory)
