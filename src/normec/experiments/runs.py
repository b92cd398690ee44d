"""A run on disk.

    runs/NAME/  config.toml  metrics.jsonl  summary.json  report.html  ledger.jsonl  model.safetensors  checkpoint/

`config.toml` has every setting with the value that was used, and repeats the run. `summary.json` has the same settings
and the results, and `report.html` shows both. `train` writes the other files. A folder belongs to one configuration: a
run that was stopped continues there, and a finished run is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import data
from ..algorithms.catalogue import is_own
from ..algorithms.lr_schedule import ScheduledLR
from ..data.partition import BY_GROUPS
from ..data.table import is_table
from ..errors import Diverged, UsageError
from ..problems.problem import Problem
from ..settings.config import IDENTITY, RunConfig
from ..settings.validation import load
from ..storage.checkpoint import EXTENDED, LATEST
from ..storage.history import NOT_COVERED, STARTED_BY, History
from ..storage.run_folder import CONFIG, SCHEMA
from ..system.files import read_json, read_text, read_toml, write_atomic
from ..system.processes import Interrupt
from ..training.callbacks import Callback, undone_after
from ..training.communicator import Communicator, SingleProcess
from ..training.interleaved import run_to_end
from ..training.loop import TrainingLoop
from ..training.run import Run
from ..training.saved_run import Result, read
from ..training.summary import record_divergence, summarise, write_summary, write_tables
from ..training.train import prepare, ready
from . import build, methods
from .own_problem import has_own_data, short_name
from .resolve import Measured, resolved

# Settings whose defaults depend on the data: the number of clients, of parameters, or of rounds.
DATA_DEPENDENT = ("clients", "k", "log_every", "evaluate_every", "averaging_start")
HELD_OUT = (
    "the validation records are held out of the training records: no client has them, no noise covers them, and the "
    "guarantee does not protect them"
)
FITTED = f"the inputs were scaled by statistics of the training records, which are {NOT_COVERED}: no noise covers them"
COUNTED = (
    f"the classes, and with them the size of the model, are those that occur in the records, which is {NOT_COVERED}: "
    "one record may add a class; a data_schema states the classes of a table beforehand"
)
DEALT = (
    "the clients are simulated: split = {} dealt the records of the table out to them, whoever owns the records; use "
    "split = centre for the owners that the schema names, or unit = record to protect each record"
)


def execute(
    config: RunConfig,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    communicator: Communicator | None = None,
) -> Result:
    """Train the run of `config` in its folder, or continue it; a finished run is only read."""
    with Interrupt() as interrupt, ready(config.precision):
        return run_to_end(steps(config, folder, callbacks, lambda: interrupt.asked, communicator=communicator))


def steps(
    config: RunConfig,
    folder: Path | None,
    callbacks: Sequence[Callback],
    asked: Callable[[], bool],
    problem: Problem | None = None,
    communicator: Communicator | None = None,
) -> Generator[None, None, Result]:
    """`execute` round by round, until `asked` returns True; `problem` is the problem of `config`, if it exists already.

    The caller must enter `ready`, because runs that take turns share the precision of torch. Only rank 0 writes.
    """
    folder, communicator = default_folder(config) if folder is None else folder, communicator or SingleProcess()
    known = communicator.on_rank_zero(lambda: _finished(folder, config))
    if known is not None:
        return read(folder) if communicator.rank == 0 else Result(folder, known, History())
    problem = build.problem(config) if problem is None else problem
    schema = read_text(Path(config.data_schema)) if config.data_schema is not None else None
    method = methods.build(config, len(problem.x0), problem.tensor_sizes)
    used: dict[str, Any] = {}
    summary: dict[str, Any] = {}

    def keep(run: Run) -> None:
        communicator.on_rank_zero(lambda: write_tables(folder, run))
        if schema is not None:
            communicator.on_rank_zero(lambda: write_atomic(folder / SCHEMA, schema))
        summary.update(summarise(run, used))
        if summary["privacy"] is not None:
            if problem.validation is not None:
                summary["privacy"]["notes"] += (HELD_OUT,)
            summary["privacy"]["notes"] += _notes_on_data(config)
        if communicator.size > 1:
            summary["ranks"] = communicator.size
        communicator.on_rank_zero(lambda: write_summary(folder, summary))

    try:
        # A later private run of this process, as in a comparison, must find nothing that this one saw.
        with undone_after(problem, not config.private, method):
            loop = prepare(problem, method, build.training(config, folder, callbacks, communicator))
            loop.storage.settings = settings_of(config, loop)
            used.update(loop.storage.settings)
            run = yield from loop.steps(asked, keep)
    except Diverged as error:
        if communicator.rank == 0:
            record_divergence(used, folder, error)
        raise
    return Result(folder, summary, run.history)


def _notes_on_data(config: RunConfig) -> tuple[str, ...]:
    """What the data of a private run show without noise, and whom its clients stand for."""
    if has_own_data(config):
        return ()
    if is_table(config.data):  # what `load` would say, without another look at the file
        dealt = config.unit == "client" and config.split not in BY_GROUPS
        return (*([COUNTED] if config.data_schema is None else []), *([DEALT.format(config.split)] if dealt else []))
    found = data.load(config.data, config.data_dir, config.scaling)
    return (*([FITTED] if found.fitted else []), *([COUNTED] if found.counted else []))


def _finished(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of the run in the folder if it is finished, else None."""
    known = existing(folder, config)
    if known is None or known.summary["status"] != "finished":
        return None
    rounds = methods.rounds(config)
    if rounds is not None and rounds > known.summary["rounds"]:  # the run goes on
        return None
    # Only the checkpoint can tell whether the theory gives the step size that is stored there.
    unsure = config.lr == "theory" and known.summary.get("config", {}).get("lr") != "theory"
    return None if unsure else known.summary


def default_folder(config: RunConfig) -> Path:
    return (
        Path("runs")
        / f"{short_name(config.data)}-{short_name(config.model)}-{short_name(config.method)}-{config.digest()}"
    )


def settings_of(config: RunConfig, loop: TrainingLoop | None = None) -> dict[str, Any]:
    """Return every setting with the value that is used, as far as it is known; `loop` is the prepared run, if any."""
    if loop is None:
        return resolved(config).record()
    lr = loop.plan.lr.lr if isinstance(loop.plan.lr, ScheduledLR) else loop.plan.lr
    measured = Measured(
        clients=loop.problem.clients,
        dimension=len(loop.problem.x0),
        rounds=loop.plan.rounds,
        lr=lr if isinstance(lr, float) else None,
        log_every=loop.plan.log_every,
        evaluate_every=loop.plan.evaluate_every,
        device=str(build.device(config.device)),
        engine=loop.engine.name,
    )
    return resolved(config, measured).record()


def existing(folder: Path, config: RunConfig, method: str | None = None) -> Result | None:
    """Return the run in the folder, or None if there is none; a run of another configuration is refused.

    Configurations are compared by the values that are used. Values that depend on data, which are not loaded here, are
    computed from the facts in the folder; training compares them again with its checkpoint. `method` is the name under
    which a user's own method is found, if it differs from that in `config`.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; a run needs a folder")
    path = folder / CONFIG
    if not path.exists():
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise UsageError(f"{folder} exists but is not a run (it has no config.toml); choose another folder")
        return None
    if STARTED_BY in read_toml(path):
        raise UsageError(f"{folder} holds a run that was started from Python; choose another folder with --out")
    stored = load(path)
    if is_own(stored.method) and stored.method != config.method:  # before its file is run, which may be anybody's
        raise _another(folder, "method", stored.method, config.method)
    measured = replace(_measured(folder, config, stored), method=method)
    ours, theirs = resolved(config, measured), resolved(stored, measured)
    free = _may_differ(config, ours, theirs, folder)
    for key in sorted(IDENTITY):
        here, there = getattr(ours, key), getattr(theirs, key)
        if here != there and key not in free and not (key in DATA_DEPENDENT and None in (here, there)):
            raise _another(folder, key, there, here)
    return read(folder) if (folder / "summary.json").exists() else None


def _another(folder: Path, key: str, there: Any, here: Any) -> UsageError:
    return UsageError(
        f"{folder} holds a run of another configuration: {key} is {there!r} there, {here!r} here; "
        "choose another folder with --out"
    )


def _may_differ(config: RunConfig, ours: RunConfig, theirs: RunConfig, folder: Path) -> tuple[str, ...]:
    """Return the settings that a run with more rounds need not share with the run that it continues.

    Training compares them with the checkpoint.
    """
    rows = tuple(name for name in ("log_every", "evaluate_every") if getattr(config, name) is None)
    if ours.rounds is not None and theirs.rounds is not None and ours.rounds > theirs.rounds:
        return ("rounds", "epsilon", *rows)
    with suppress(FileNotFoundError, UsageError, KeyError, TypeError):  # reading the run will report what is wrong
        identity = read_json(folder / "checkpoint" / LATEST)["identity"]
        if EXTENDED in identity or identity["rounds"] < ours.rounds:  # its config.toml may be ahead of the checkpoint
            return rows
    return ()


def _measured(folder: Path, config: RunConfig, stored: RunConfig) -> Measured:
    """Return the facts about the data in a run's folder, if a setting of either configuration depends on them."""
    lr = stored.lr if isinstance(stored.lr, float) else None
    if not any(_depends_on_data(one) for one in (config, stored)):
        return Measured(lr=lr)
    facts: dict[str, Any] = {}
    for name in ("checkpoint/latest.json", "summary.json"):
        with suppress(FileNotFoundError, UsageError):  # reading the run will report what is wrong
            found = read_json(folder / name)
            facts |= found.get("identity", found) if isinstance(found, dict) else {}
    known = {key: facts[key] for key in ("clients", "dimension", "rounds") if isinstance(facts.get(key), int)}
    return Measured(**known, lr=lr)


def _depends_on_data(config: RunConfig) -> bool:
    """Whether a default of the configuration depends on data."""
    return methods.needs_dimension(config) or build.number_of_clients(config) is None or methods.rounds(config) is None
