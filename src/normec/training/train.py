"""`train`: validate the arguments and run the training loop."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..algorithms.averaging import Averaging, Kind, averaging_of
from ..algorithms.local_steps import LocalSteps
from ..algorithms.lr_schedule import LRSchedule, ScheduledLR, SchedulerFactory, scheduled
from ..algorithms.method import Method, Steps, may_round, overrides
from ..algorithms.registry import identity_of
from ..algorithms.server_optimizer import OptimizerFactory, ServerOptimizer, server_optimizer_of
from ..errors import Diverged, UsageError, at_least, needed
from ..gradients.loop import state_of_objective
from ..gradients.precision import Precision, products
from ..gradients.restored import look_up_again
from ..problems.client_data import ResidentRecords
from ..problems.objective import Objective
from ..problems.problem import Problem
from ..sampling.batches import rounds_of
from ..sampling.participation import Everyone, Participation, Poisson, Rotation
from ..storage.checkpoint import SECRET, read_facts
from ..storage.history import COLUMNS
from ..storage.run_folder import RunStorage, stored_secret
from .callbacks import Callback, undone_after
from .client_weights import Weights, relative_weights
from .communicator import Communicator, SingleProcess, check_agreement
from .extension import extension_of, logging_of, refuse_hidden_growth, with_noise_before
from .independence import refuse_coupled_clients, refuse_mixing_methods, refuse_modes
from .loop import TrainingLoop
from .memory_table import MemoryTable
from .named_method import local_steps_of, method_of, rounds_of_method, step_size_of
from .options import Compute, Logging, Memory, Options, Storage, device_of
from .run import (
    InitialMemory,
    Plan,
    Run,
    Schedule,
    default_evaluate_every,
    default_log_every,
    record_clip_of,
)
from .run_mechanism import assumptions, mechanism_of, refuse_shared_records, refuse_subclasses
from .settings_used import settings_used
from .summary import keep_result, record_divergence

if TYPE_CHECKING:
    from ..privacy.statement import Privacy


def train(
    problem: Objective,
    method: Method | str,
    *,
    lr: float | Schedule | Literal["theory"] | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    batch_rate: float | None = None,
    local: LocalSteps | None = None,
    warmup: int = 0,
    lr_schedule: str | LRSchedule | SchedulerFactory | None = None,
    server_optimizer: str | ServerOptimizer | OptimizerFactory | None = None,
    averaging: Kind | Averaging | None = None,
    privacy: Privacy | None = None,
    public_sizes: bool = False,
    participation: Participation | None = None,
    weights: Weights = "equal",
    seed: int | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    logging: Logging = Logging(),
    memory: Memory = Memory(),
    compute: Compute = Compute(),
    storage: Storage = Storage(),
) -> Run:
    """Minimise `problem` by `method`: x ← x − lr · direction, once per round, or a step of `server_optimizer`.

    In a round every client that takes part sends one message. Give `rounds`, or `epochs`.

    With `privacy` every message leaves with noise, which is calibrated for all rounds and paid for in a ledger. A run
    that no rule covers is refused before anything is computed. `run.privacy` says what was spent. The history of a
    private run holds only what the guarantee covers: rounds, messages, bytes, ε, and results on test and validation
    data. `Logging(diagnostics=True)` adds what it does not cover.

    With `out` the run lives in a folder. If it is killed, the same call continues from the last checkpoint and ends
    with the same numbers. The folder's config.toml holds every setting with the value that is used, and summary.json,
    report.html and model.safetensors hold the result (`normec.load`). Ctrl-C ends the run after the current round, with
    a checkpoint.

    The same seed gives the same bits on the same machine, whatever is logged, evaluated or interrupted. Private runs
    with different settings share no noise.

    Args:
        problem: What is minimised: a `Problem`, or plain functions (`Problem.from_functions`).
        method: What clients send and what the server does with it, such as `NormEC`; or a name as on the command line,
            such as "normec", with the settings that the command line uses.
        lr: The step size: a number, a function of the round, or "theory" for the step size with the best guarantee
            (`normec.theory`). The default is the usual step size of a method that is given by name. A function is
            called for all rounds before the first round begins, so that it cannot depend on the clients' data.
        rounds: The number of rounds (default: the usual number of a method that is given by name). More rounds than a
            finished run in `out` has made continue that run; if a private run's noise was calibrated for a target ε,
            `privacy` must state the larger ε.
        epochs: The number of passes over the average client's records, instead of `rounds`.
        batch_size: Records per gradient (default: full local gradients).
        batch_rate: The probability with which each record is part of a gradient (Poisson batches), instead of
            `batch_size`.
        local: Local steps of every client in a round, whose result takes the gradient's place in its message (default:
            one gradient).
        warmup: In this many first rounds lr is 0: memories approach the gradients, and x does not move.
        lr_schedule: How lr changes over the rounds: "constant", "cosine", "linear", "step", an `LRSchedule`, or a
            function from an optimizer to a torch scheduler (default: lr as it is). The first round that moves x is its
            first.
        server_optimizer: How the server moves x along the direction: "momentum", "nesterov", "adam", "adamw",
            "rmsprop", "adambc", another class of `torch.optim` by name, a `ServerOptimizer`, or a function from
            parameters to a torch optimizer (default: x ← x − lr · direction).
        averaging: Evaluate and return an average of the iterates: "ema", "polyak", or an `Averaging` (default: the last
            iterate).
        privacy: Who is protected, from whom, and how well; None for a run without noise.
        public_sizes: Declare public how many records each client holds. With `privacy` of whole clients, `epochs` of
            batches and weights by records need this, because the rounds or the weights follow from these numbers.
        participation: Which clients take part in a round: `Everyone`, `Poisson`, `FixedSize` or `Rotation` (default:
            everyone, or the sampling that `privacy` claims).
        weights: The weights w_i of f(x) = Σ w_i f_i(x): "equal" (1/n), "records" (a client's share of all records), or
            n positive numbers with the sum 1. They are public; the messages' sum and its noise follow from them.
        seed: The seed of everything random (default: 0). A private run without a given seed draws its noise, and who
            takes part, from a fresh secret that only its folder keeps.
        device: Where to compute, such as "cuda" (default: where the model is).
        out: The folder of the run; None keeps nothing on disk.
        callbacks: Objects that watch the run and may stop it, such as `EarlyStopping`.
        logging: What is recorded, and how often.
        memory: The clients' first memories, and how the table of them is kept.
        compute: Types, engine, precision and processes.
        storage: How often checkpoints are written, and which file outside the folder also counts the ledger's lines.

    Returns:
        The run: the final model, the history, and what was spent. `run.stopped` says why it ended early, if it did.

    Raises:
        UsageError: An argument is wrong, two contradict each other, no privacy rule covers the run, the folder holds
            another run, or its ledger has fewer lines than the witness counts.
        Diverged: A gradient or a message is not finite, or a message exceeds its bound.

    Example:
        >>> import torch
        >>> from normec import NormEC, Problem
        >>> bowls = [lambda x, c=c: ((x - c) ** 2).sum() / 2 for c in (1.0, 2.0, 6.0)]
        >>> problem = Problem.from_functions(bowls, torch.zeros(2, dtype=torch.float64))
        >>> run = train(problem, NormEC(alpha=0.1, beta=0.2), lr=0.05, rounds=200, logging=Logging(every=10))
        >>> run.finished, len(run.history.rows)
        (True, 21)
        >>> run.x.round(decimals=1)  # the mean of the three minima
        tensor([3., 3.], dtype=torch.float64)
    """
    options = Options(
        lr=lr,
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        batch_rate=batch_rate,
        local=local,
        warmup=warmup,
        lr_schedule=lr_schedule,
        server_optimizer=server_optimizer,
        averaging=averaging,
        privacy=privacy,
        public_sizes=public_sizes,
        participation=participation,
        weights=weights,
        seed=seed,
        device=device,
        out=out,
        callbacks=callbacks,
        logging=logging,
        memory=memory,
        compute=compute,
        storage=storage,
    )
    try:
        with undone_after(problem, privacy is None, method):  # a later private run must find nothing that this one saw
            loop = prepare(problem, method, options)
            with ready(compute.precision):
                try:
                    return loop.run(partial(_keep, loop.communicator))
                except Diverged as error:
                    if loop.storage.out is not None:
                        record_divergence(loop.storage.settings, loop.storage.out, error)
                    raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        # PyTorch raises these where a model, a loss and records do not fit together; ours have said what is wrong.
        if isinstance(problem, Problem) and not type(error).__module__.startswith("normec."):
            problem.refuse_misfit("the model or its loss", fetch=True)
        raise


def _keep(communicator: Communicator, run: Run) -> None:
    """Write the files about a result. Collective."""
    communicator.on_rank_zero(lambda: keep_result(run, communicator.size))


def prepare(problem: Objective, method: Method | str, options: Options) -> TrainingLoop:
    """Validate the arguments of `train`, and return its loop before the first round."""
    _check_problem(problem)
    _check_callbacks(options.callbacks)
    private = options.privacy is not None
    if private and not hasattr(options.privacy, "with_noise"):
        raise UsageError(f"privacy must be a normec.Privacy, such as Privacy(epsilon=8), got {options.privacy!r}")
    method, entry = method_of(method, problem, private, options.participation, _clips_records(problem, options))
    optimizer = server_optimizer_of(options.server_optimizer)
    lr = step_size_of(options.lr, method, entry, private, optimizer)
    if entry is not None:
        rounds_given = options.rounds is not None or options.epochs is not None
        options = replace(
            options,
            rounds=options.rounds if rounds_given else rounds_of_method(entry, private),
            local=options.local if options.local is not None else local_steps_of(entry, private),
        )
    logging, memory, compute, out = options.logging, options.memory, options.compute, options.out
    communicator, witness = compute.communicator or SingleProcess(), options.storage.witness
    rounds, epochs, batch_size = map(_plain, (options.rounds, options.epochs, _batch_size(options)))
    local = options.local
    if local is not None:
        local = replace(local, steps=_plain(local.steps), epochs=_plain(local.epochs), batch_size=None)
    seed, warmup = map(_plain, (options.seed, options.warmup))
    log_every, evaluate_every = map(_plain, (logging.every, logging.evaluate_every))
    privacy = options.privacy.with_noise("seeded") if options.privacy is not None else None
    if privacy is not None and local is None and _has_single_records(problem) and isinstance(compute.engine, str):
        privacy = privacy.with_record_clip("auto")
    at_least(0, seed=seed or 0)
    batch_rate = options.batch_rate
    initial_memory = memory.initial
    if not isinstance(initial_memory, str):
        initial_memory = torch.as_tensor(initial_memory)
    at_least(0, warmup=warmup)
    if rounds is not None:
        at_least(1, rounds=rounds)
        if rounds <= warmup:
            raise UsageError(f"warmup must be below the {rounds} rounds, got {warmup}; x would never move")
    _check_batches(problem, batch_size, batch_rate)
    if local is not None:
        _check_local(local, epochs, batch_rate)
    if overrides(method, "local_correction") and (local is None or local.scale != "gradient"):
        raise UsageError(
            f"{method.name} corrects local steps; give local=LocalSteps(steps=…, lr=…) with scale='gradient'"
        )
    device = device_of(options.device) if options.device is not None else problem.x0.device
    problem = _moved(problem, device, compute.dtype)
    counted = epochs is not None and batch_size is not None  # the rounds follow from the clients' sizes
    if privacy is not None and counted:
        privacy.refuse_private_sizes(options.public_sizes)
    total = _horizon(problem, rounds, epochs, batch_size)
    weights = relative_weights(options.weights, problem, privacy, options.public_sizes)
    privacy = privacy.for_rounds(total) if privacy is not None else None
    if isinstance(lr, str):
        if optimizer is not None or options.lr_schedule is not None:
            raise UsageError(
                "lr='theory' is for plain steps of one size; leave out the optimizer or schedule, or give lr"
            )
        if weights is not None:
            raise UsageError(
                "lr='theory' is for equal weights, which the theorems assume; leave out the weights, or give lr"
            )
        sampled = batch_size or batch_rate or options.participation or local
        lr = _lr_by_theory(problem, method, total, sampled, privacy, warmup, initial_memory)
    plan = Plan(
        lr=_step_sizes(options.lr_schedule, lr, total, warmup),
        rounds=total,
        batch_size=batch_size,
        batch_rate=batch_rate,
        warmup=warmup,
        seed=seed or 0,
        secret=_secret(out, communicator) if _draws_in_secret(privacy, seed) else None,
        mask_secret=_secret(out, communicator) if _masks_in_secret(privacy) else None,
        participation=_participation(options.participation, privacy),
        initial_memory=initial_memory,
        log_every=log_every if log_every is not None else default_log_every(total),
        evaluate_every=evaluate_every if evaluate_every is not None else default_evaluate_every(total),
        full_gradient=logging.full_gradient,
        diagnostics=logging.diagnostics or privacy is None,
        precision=compute.precision,
        memory=MemoryTable(None if memory.dtype == problem.x0.dtype else memory.dtype, memory.home),
        local=local,
        server_optimizer=optimizer,
        averaging=averaging_of(options.averaging, total, warmup),
        weights=weights,
    )
    found, done = communicator.on_rank_zero(lambda: _stored(out))
    plan = logging_of(plan, found, {"log_every": log_every, "evaluate_every": evaluate_every})
    if plan.full_gradient and not plan.diagnostics:
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
            "witness counts the lines of the ledger of a private run in a folder; give privacy and out as well, or "
            "leave witness out"
        )
    if logging.profile and out is None:
        raise UsageError("profile writes a trace to the folder of the run; give out as well, or leave profile out")
    _check_metric_names(problem)
    plan.participants(problem.clients, 0)  # refuses what cannot be drawn, before anything starts
    kept, extension = out is not None, None
    if kept:
        needed("safetensors")  # before anything is written
    identity = {
        "method": identity_of(method),
        "dtype": str(problem.x0.dtype),
        "privacy": privacy.to_dict() if privacy is not None else None,
        SECRET: _digest(plan.kept_secret) if plan.kept_secret is not None else None,
        **plan.identity(),
        **({"diagnostics": plan.diagnostics} if privacy is not None else {}),
    }
    folder = Path(out) if out is not None else Path()
    if found is not None:
        extension = extension_of(found, done, identity, plan, folder)
        if extension is not None and privacy is not None:
            before, stated = extension, privacy
            extension = communicator.on_rank_zero(lambda: with_noise_before(before, stated, folder))
    mechanism = None
    if privacy is not None:
        refuse_subclasses(plan)
        own_engine = not isinstance(compute.engine, str)
        notes = assumptions(problem, method, privacy, plan, counted, own_engine, logging.profile)
        counted_by = Path(witness) if witness is not None else None
        mechanism = mechanism_of(problem, method, plan, privacy, notes, counted_by, extension, own_engine)
        if mechanism.banded is not None and not mechanism.simulated and communicator.size > 1:
            raise UsageError(
                f"noise={privacy.noise!r} with noise_bands needs the sums of past rounds in one place, and there are "
                f"{communicator.size} ranks; start one process, or leave out noise_bands"
            )
        if extension is not None:
            refuse_hidden_growth(extension, mechanism, folder)
        if isinstance(problem, Problem):
            refuse_shared_records(problem, privacy, plan.diagnostics)
            look_up_again(problem)
        refuse_modes()
        # Before anything else runs the caller's code, which may keep what it saw first.
        refuse_mixing_methods(method, len(problem.x0))
        refuse_coupled_clients(problem, plan.seed, record_clip_of(privacy))
    if isinstance(problem, Problem) and not isinstance(problem.records, ResidentRecords):
        problem.refuse_wrong_loss()
    if kept or communicator.size > 1:  # else nobody asks, and checksums of large data take their time
        with state_of_objective(problem).restored():  # a collate function sees the first record of every client
            identity |= problem.fingerprint()
    previous = extension.previous(identity) if extension is not None else None
    identity |= extension.facts() if extension is not None else {}
    if communicator.size > 1:
        _spread(communicator, problem.clients, {**identity, "device": problem.x0.device.type, "out": str(out)})
    storage = RunStorage(folder if kept and communicator.rank == 0 else None, identity, plan.kept_secret, previous)
    watching = options.callbacks if communicator.rank == 0 else ()
    seconds = options.storage.checkpoint_seconds
    loop = TrainingLoop(
        problem,
        method,
        plan,
        compute.engine,
        storage,
        seconds,
        watching,
        mechanism,
        communicator,
        kept,
        logging.profile,
    )
    if communicator.rank == 0:
        storage.settings = settings_used(
            problem, method, plan, privacy, loop.engine.name, seconds, witness, logging.profile
        )
    return loop


def _step_sizes(
    schedule: str | LRSchedule | SchedulerFactory | None, lr: float | Schedule, rounds: int, warmup: int
) -> float | tuple[float, ...] | ScheduledLR:
    """Return the step sizes of a plan."""
    if schedule is not None:
        return scheduled(schedule, lr, rounds, warmup)
    return _tabulated(lr, rounds) if callable(lr) else lr


def _tabulated(lr: Schedule, rounds: int) -> tuple[float, ...]:
    """Return the step sizes of all rounds, before any data are read: x may depend on the data by messages only."""
    sizes = tuple(float(lr(k)) for k in range(rounds))
    for k, size in enumerate(sizes):
        if not (math.isfinite(size) and size >= 0):
            raise UsageError(f"lr must be >= 0 and finite, got {size} in round {k}")
    return sizes


def _check_problem(problem: Any) -> None:
    if isinstance(problem, Method | str) or not hasattr(problem, "client_loss"):
        raise UsageError(
            f"the first argument must be a normec.Problem, got {type(problem).__name__}; "
            "call train(problem, method, ...)"
        )


def _check_callbacks(callbacks: Any) -> None:
    held = callbacks if isinstance(callbacks, list | tuple) else [None]
    for one in held:
        if not isinstance(one, Callback):
            got = type(callbacks if held == [None] else one).__name__
            raise UsageError(f"callbacks must be a list of objects of normec.Callback, got {got}")


def _check_metric_names(problem: Objective) -> None:
    """Refuse metrics and test sets whose columns every run has already."""
    names = [*problem.metrics, *(f"{name}_loss" for name in problem.test_names)] if isinstance(problem, Problem) else []
    for name in names:
        if name in COLUMNS or f"validation_{name}" in COLUMNS:
            raise UsageError(f"every run has a column {name!r} already; give the metric or test set another name")


def _plain(number: Any) -> Any:
    """Convert NumPy's integers to Python's, for files and seeds; return everything else unchanged."""
    return int(number) if type(number) is not bool and isinstance(number, Integral) else number


def _moved(problem: Objective, device: torch.device, dtype: torch.dtype | None) -> Objective:
    """Return the problem on that device and in that precision; the same object if nothing changes."""
    there = problem.x0.device
    near = device.type == there.type and device.index in (None, there.index)
    return problem if near and dtype in (None, problem.x0.dtype) else problem.to(device, dtype)


def _clips_records(problem: Objective, options: Options) -> bool:
    """Whether records are protected, and each has a norm of one at most (`record_clip="auto"`)."""
    privacy = options.privacy
    if privacy is None or privacy.unit != "record" or options.local is not None:
        return False
    default = _has_single_records(problem) and isinstance(options.compute.engine, str)
    return privacy.record_clip == "auto" or (privacy.record_clip is None and default)


def _has_single_records(problem: Objective) -> bool:
    """Whether the records of clients can be clipped one by one."""
    return type(problem) is Problem and problem.form.collate is None


def _draws_in_secret(privacy: Privacy | None, seed: int | None) -> bool:
    """Whether noise and sampling come from a secret: those of a simulation for which no seed was given."""
    return privacy is not None and privacy.noise == "seeded" and seed is None


def _masks_in_secret(privacy: Privacy | None) -> bool:
    """Whether the random numbers of models come from a secret of their own (`Plan.model_seed`)."""
    return privacy is not None and privacy.noise != "seeded" and privacy.record_clip is not None


def _secret(out: str | Path | None, communicator: Communicator) -> int:
    """Return the secret of a run: the folder's, or a fresh one."""
    found: int = communicator.on_rank_zero(
        lambda: (stored_secret(Path(out)) if out is not None else None) or secrets.randbits(128)
    )
    return found


def _stored(out: str | Path | None) -> tuple[dict[str, Any] | None, int]:
    """Return the identity of the run in a folder and the rounds that are done there; None if no run has begun."""
    facts = read_facts(Path(out) / "checkpoint") if out is not None else None
    return (facts["identity"], int(facts["round"])) if facts is not None else (None, 0)


def _digest(secret: int) -> str:
    """Return the digest by which a checkpoint recognises the secret; its 64 bits do not reveal the 128 bits."""
    return hashlib.sha256(f"noise secret {secret:032x}".encode()).hexdigest()[:16]


def _spread(communicator: Communicator, clients: int, identity: dict[str, Any]) -> None:
    """Check that the run can be divided among the ranks; all ranks raise the same error."""
    check_agreement(communicator, identity)
    if clients < communicator.size:
        raise UsageError(
            f"{clients} clients on {communicator.size} ranks leave {communicator.size - clients} ranks without data; "
            f"start at most {clients}"
        )


@contextmanager
def ready(precision: Precision) -> Iterator[None]:
    """Configure torch for runs of that precision, and restore its settings afterwards."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(), products(precision):
            yield
    finally:
        torch.set_num_threads(threads)


def _horizon(problem: Objective, rounds: int | None, epochs: int | None, batch_size: int | None) -> int:
    """Return the number of rounds, as given or from the epochs."""
    if (rounds is None) == (epochs is None):
        raise UsageError(f"give rounds or epochs, one of them, got rounds={rounds} and epochs={epochs}")
    if rounds is not None:
        return rounds
    if problem.sizes is None:
        raise UsageError("epochs need records; a problem of plain functions takes rounds")
    return rounds_of(epochs or 0, problem.sizes, batch_size)


def _check_batches(problem: Objective, batch_size: int | None, batch_rate: float | None) -> None:
    if batch_size is not None and batch_rate is not None:
        raise UsageError(f"give batch_size or batch_rate, not both, got {batch_size} and {batch_rate}")
    if batch_size is not None:
        at_least(1, batch_size=batch_size)
    if batch_size is not None and problem.sizes is not None and batch_size > int(problem.sizes.max()):
        raise UsageError(
            f"batch_size = {batch_size} is more than any client has; leave it out for full local gradients, "
            "or give less"
        )
    if problem.sizes is None and (batch_size is not None or batch_rate is not None):
        raise UsageError(f"plain functions have no records to take a batch of, got {batch_size or batch_rate}")


def _batch_size(options: Options) -> int | None:
    """Return the records per gradient, which local steps may state as well."""
    local = options.local.batch_size if options.local is not None else None
    if local is not None and options.batch_size not in (None, local):
        raise UsageError(f"batch_size is {options.batch_size} and {local} for local steps; give one of them")
    return options.batch_size if local is None else local


def _check_local(local: LocalSteps, epochs: int | None, batch_rate: float | None) -> None:
    if epochs is not None:
        raise UsageError("epochs count one gradient per round; with local steps give rounds")
    if local.epochs is not None and batch_rate is not None:
        raise UsageError("local epochs need batches of a fixed size; give batch_size, or local steps")


def _participation(given: Participation | None, privacy: Privacy | None) -> Participation:
    """Return the participation rule; the sampling that a privacy statement claims is the sampling that is used."""
    claimed: Participation | None = None
    if privacy is not None and privacy.sampling is not None:
        rate = privacy.sampling
        claimed = Rotation(given.groups, rate) if isinstance(given, Rotation) else Poisson(rate)
    if claimed is not None and given is not None and given != claimed:
        raise UsageError(f"privacy claims clients sampled by {claimed}, but participation is {given}; give one of them")
    if given is not None and not hasattr(given, "draw"):
        raise UsageError(
            "participation must be normec.Poisson(rate), normec.FixedSize(count) or normec.Rotation(groups), got "
            f"{given!r}"
        )
    return claimed or given or Everyone()


def _lr_by_theory(
    problem: Objective,
    method: Method,
    rounds: int,
    sampled: object,
    privacy: Privacy | None,
    warmup: int,
    initial_memory: InitialMemory,
) -> float:
    """Return the step size with the best guarantee; the theorems hold for full gradients of all clients."""
    from ..theory import step_size

    if sampled is not None:
        raise UsageError(
            "lr='theory' is for full gradients of all clients; drop batches, sampling or local steps, or give lr"
        )
    if privacy is not None:
        raise UsageError(
            "lr='theory' reads L and the first gradients from the data without noise, which privacy does not cover; "
            "plan on public data (`normec theory plan`) and give lr as a number"
        )
    if not isinstance(initial_memory, str):
        raise UsageError("lr='theory' needs initial_memory 'zero' or 'gradient'")
    return step_size(problem, method, rounds, warmup=warmup, start=initial_memory)
