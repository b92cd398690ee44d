"""A run on disk.

    runs/NAME/  config.toml  metrics.jsonl  summary.json  report.html  ledger.jsonl  checkpoint/

`config.toml` has every setting with the value that was used, and repeats the run. `summary.json` has the same settings
and the results, and `report.html` shows both. `train` writes the other files. A folder belongs to one configuration: a
run that was stopped continues there, and a finished run is not changed.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__, data
from ..algorithms.lr_schedule import ScheduledLR
from ..data.table import is_table
from ..errors import Diverged, UsageError
from ..privacy.ledger_verification import verified
from ..problems.problem import Problem
from ..report import page
from ..settings.config import IDENTITY, RunConfig, load, to_toml
from ..storage.history import NOT_COVERED, STARTED_BY, History, uncovered
from ..storage.run_folder import CONFIG
from ..system.files import read_json, read_toml, write_atomic, writing
from ..system.processes import Interrupt
from ..training.callbacks import Callback
from ..training.communicator import Communicator, SingleProcess
from ..training.interleaved import run_to_end
from ..training.loop import TrainingLoop
from ..training.run import Run
from ..training.train import prepare, ready
from . import build, methods
from .resolve import Measured, resolved

# Settings whose defaults depend on the data: the number of clients, of parameters, or of rounds.
DATA_DEPENDENT = ("clients", "k", "log_every", "evaluate_every", "averaging_start")
HELD_OUT = (
    "the validation records are held out of the training records: no client has them, no noise covers them, and the "
    "guarantee does not protect them"
)
FITTED = f"the inputs were scaled by statistics of the training records, which are {NOT_COVERED}: no noise covers them"


@dataclass(frozen=True)
class Result:
    """The summary and the history of a run, new or read from its folder."""

    folder: Path
    summary: dict[str, Any]
    history: History


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
    method = methods.build(config, len(problem.x0), problem.tensor_sizes)
    loop = prepare(problem, method, build.training(config, folder, callbacks, communicator))
    used = settings_of(config, loop)
    loop.storage.settings = used
    try:
        run = yield from loop.steps(asked)
    except Diverged as error:
        if communicator.rank == 0 and (folder / CONFIG).exists():
            record_end(used, folder, {"status": "diverged", "round": error.round, "error": str(error)})
        raise
    if run.clients and communicator.rank == 0:
        table: dict[str, Any] = {"columns": list(run.clients), "rows": list(zip(*run.clients.values(), strict=True))}
        if run.privacy is not None:
            table["note"] = NOT_COVERED
        write_atomic(folder / "clients.json", json.dumps(table) + "\n", private=run.privacy is not None)
    summary = summarise(run, used)
    if summary["privacy"] is not None:
        if config.validation:
            summary["privacy"]["notes"] += (HELD_OUT,)
        if not is_table(config.data) and data.load(config.data, config.data_dir, config.scaling).fitted:
            summary["privacy"]["notes"] += (FITTED,)
    if communicator.size > 1:
        summary["ranks"] = communicator.size
    communicator.on_rank_zero(lambda: write_summary(folder, summary))
    return Result(folder, summary, run.history)


def _finished(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of the run in the folder if it is finished, else None."""
    known = existing(folder, config)
    if known is None or known.summary["status"] != "finished":
        return None
    # Only the checkpoint can tell whether the theory gives the step size that is stored there.
    unsure = config.lr == "theory" and known.summary.get("config", {}).get("lr") != "theory"
    return None if unsure else known.summary


def default_folder(config: RunConfig) -> Path:
    return Path("runs") / f"{config.data.replace('/', '_')}-{config.model}-{config.method}-{config.digest()}"


def read(folder: Path) -> Result:
    """Read a run from its folder; the ledger of a private run must support its summary."""
    try:
        summary = read_json(folder / "summary.json")
    except FileNotFoundError:
        raise UsageError(f"{folder} has no finished or interrupted run (there is no summary.json)") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise UsageError(
            f"{folder / 'summary.json'} is damaged: it has no status; remove it, and run the command again to write it"
        )
    verified(folder, summary)
    history = History(folder / "metrics.jsonl")
    history.reread()
    return Result(folder, summary, history)


def record_end(settings: Mapping[str, Any], folder: Path, facts: dict[str, Any]) -> None:
    """Record in its folder that a run ended without a result; `facts` are its status and the reason."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():
        write_atomic(folder / CONFIG, to_toml(settings))
    history = History(folder / "metrics.jsonl")
    history.reread()
    write_summary(folder, {**facts, **_recorded(settings), "final": history.rows[-1] if len(history) else {}})


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
        device=str(build.device(config.device)),
        engine=loop.engine.name,
    )
    return resolved(config, measured).record()


def summarise(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run; `settings` are all settings that were used."""
    last = run.history.rows[-1] if len(run.history) else {}
    accuracies, norms = run.history["accuracy"], run.history["grad_norm"]
    best = max(accuracies, default=None)
    return {
        "status": "finished" if run.finished else "interrupted" if run.stopped == "interrupted" else "stopped",
        "stopped": run.stopped,
        "privacy": run.privacy.to_dict() if run.privacy is not None else None,
        "not_covered": uncovered(last),
        "round": run.state.round,
        "rounds": run.rounds,
        "final": last,
        "best_accuracy": best,
        "best_accuracy_round": run.history.rounds("accuracy")[accuracies.index(best)] if best is not None else None,
        "smallest_grad_norm": min(norms, default=None),
        "clients": run.n,
        "dimension": len(run.x),
        "message_bound": run.method.bound if math.isfinite(run.method.bound) else None,
        "engine": run.engine,
        "device": device_name(run.x.device),
        "timings": {part: round(seconds, 4) for part, seconds in run.timings.items()},
        **_recorded(settings),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


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
    measured = replace(_measured(folder, config, stored), method=method)
    ours, theirs = resolved(config, measured), resolved(stored, measured)
    for key in sorted(IDENTITY):
        here, there = getattr(ours, key), getattr(theirs, key)
        if here != there and not (key in DATA_DEPENDENT and None in (here, there)):
            raise UsageError(
                f"{folder} holds a run of another configuration: {key} is {there!r} there, {here!r} here; "
                "choose another folder with --out"
            )
    return read(folder) if (folder / "summary.json").exists() else None


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


def _recorded(settings: Mapping[str, Any]) -> dict[str, Any]:
    versions = {"normec": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"config": dict(settings), "versions": versions}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write the page and then the summary, so that a run with a summary has a page."""
    page.write_run(folder, summary)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
