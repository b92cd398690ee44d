"""A run on disk.

    runs/NAME/  config.toml  metrics.jsonl  summary.json  report.html  ledger.jsonl  checkpoint/

`config.toml` holds every setting with the value that was used, and is what to rerun; `summary.json` holds the same
settings and what came out, `report.html` is the page about both; the rest is `train`'s.
A folder belongs to one configuration; it is known by it, goes on where it stopped, and is left alone once it is
finished.
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
    "the validation records are held out of the training records: no client holds them, no noise covers them, and the "
    "guarantee does not protect them"
)
FITTED = "the inputs were scaled by statistics of all training records, which no noise covers"


@dataclass(frozen=True)
class Result:
    """A run's summary and its history, fresh or read back from its folder."""

    folder: Path
    summary: dict[str, Any]
    history: History


def execute(
    config: RunConfig,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    communicator: Communicator | None = None,
) -> Result:
    """Train what `config` says in its folder: from the start, from where it stopped, or not at all."""
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
    """`execute`, round by round, until it is `asked` to stop; `problem` is the configuration's, if it is there already.

    Whoever steps makes torch `ready`: runs that take turns share its precision. Of several ranks the first writes.
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
        if data.load(config.data, config.data_dir).fitted:
            summary["privacy"]["notes"] += (FITTED,)
    if communicator.size > 1:
        summary["ranks"] = communicator.size
    communicator.on_rank_zero(lambda: write_summary(folder, summary))
    return Result(folder, summary, run.history)


def _finished(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run in the folder, if there is one and it has reached its end."""
    known = existing(folder, config)
    if known is None or known.summary["status"] != "finished":
        return None
    # Whether the theory gives the step size that is stored there is for the checkpoint to say.
    unsure = config.lr == "theory" and known.summary.get("config", {}).get("lr") != "theory"
    return None if unsure else known.summary


def default_folder(config: RunConfig) -> Path:
    return Path("runs") / f"{config.data.replace('/', '_')}-{config.model}-{config.method}-{config.digest()}"


def read(folder: Path) -> Result:
    """A run read back from its folder; the ledger of a private one must bear out what its summary says."""
    try:
        summary = read_json(folder / "summary.json")
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no finished or interrupted run (there is no summary.json)") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise UsageError(f"{folder / 'summary.json'} is damaged: it has no status; remove it to have it written anew")
    verified(folder, summary)
    history = History(folder / "metrics.jsonl")
    history.reread()
    return Result(folder, summary, history)


def record_end(settings: Mapping[str, Any], folder: Path, facts: dict[str, Any]) -> None:
    """Record in its folder that a run ended without a result: `facts` say its status and why."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():
        write_atomic(folder / CONFIG, to_toml(settings))
    history = History(folder / "metrics.jsonl")
    history.reread()
    write_summary(folder, {**facts, **_recorded(settings), "final": history.rows[-1] if len(history) else {}})


def settings_of(config: RunConfig, loop: TrainingLoop | None = None) -> dict[str, Any]:
    """Every setting with the value that is used, as far as it is known before (None) or when the run is prepared."""
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
    """What a reader wants to know first; `settings` are all that were used."""
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
    """The run already in the folder, None if there is none yet; another configuration's is refused.

    Configurations are compared by the values that are used. Those that depend on data which is not loaded here are
    computed from what the folder says of its data; training compares them again with its checkpoint. `method` says how
    a method of one's own is found, if not by its name.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; a run needs a folder")
    path = folder / CONFIG
    if not path.exists():
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise UsageError(f"{folder} exists and is not a run (it has no config.toml); choose another folder")
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
    """What a run's folder says of its data, where a setting of either configuration depends on it."""
    lr = stored.lr if isinstance(stored.lr, float) else None
    if not any(_depends_on_data(one) for one in (config, stored)):
        return Measured(lr=lr)
    facts: dict[str, Any] = {}
    for name in ("checkpoint/latest.json", "summary.json"):
        with suppress(FileNotFoundError, UsageError):  # whoever reads the run says what is wrong with it
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
    """The summary, and before it the page: a run that has the one has the other."""
    page.write_run(folder, summary)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
