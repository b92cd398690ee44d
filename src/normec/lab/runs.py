"""A run on disk.

    runs/NAME/  config.toml  metrics.jsonl  summary.json  ledger.jsonl  checkpoint/

`config.toml` is what to rerun, `summary.json` what came out; the rest is `train`'s. A folder belongs to one
configuration; it is known by it, goes on where it stopped, and is left alone once it is finished.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, data
from ..atomic import write_atomic
from ..callbacks import Callback
from ..errors import Diverged, UsageError
from ..history import History
from ..run import Run
from ..training import train
from . import build, methods
from .config import ELSEWHERE, RunConfig, load, to_toml

FITTED = "the inputs were scaled by statistics of all training records, which no noise covers"


@dataclass(frozen=True)
class Result:
    """A run's summary and its history, fresh or read back from its folder."""

    folder: Path
    summary: dict[str, Any]
    history: History


def execute(config: RunConfig, folder: Path | None = None, callbacks: Sequence[Callback] = ()) -> Result:
    """Train what `config` says in its folder: from the start, from where it stopped, or not at all."""
    folder = default_folder(config) if folder is None else folder
    known = _same_run(folder, config)
    if known is not None and known.summary["status"] == "finished":
        return known
    problem = build.problem(config)
    method = methods.build(config, len(problem.x0))
    try:
        run = train(
            problem, method, out=folder, callbacks=[_Keeper(folder, config), *callbacks], **build.training(config)
        )
    except Diverged as error:
        if (folder / "config.toml").exists():
            history = History(folder / "metrics.jsonl")
            history.reread()
            facts = {"status": "diverged", "round": error.round, "error": str(error)}
            _write_summary(folder, {**facts, **_setting(config), "final": history.rows[-1] if len(history) else {}})
        raise
    summary = summarise(run, config)
    if summary["privacy"] is not None and data.load(config.data, config.data_dir).fitted:
        summary["privacy"]["notes"] += (FITTED,)
    _write_summary(folder, summary)
    return Result(folder, summary, run.history)


def default_folder(config: RunConfig) -> Path:
    return Path("runs") / f"{config.data.replace('/', '_')}-{config.model}-{config.method}-{config.digest()}"


def read(folder: Path) -> Result:
    """A run read back from its folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no finished or interrupted run (there is no summary.json)") from None
    except ValueError as error:
        raise UsageError(f"{folder / 'summary.json'} is damaged: {error}") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise UsageError(f"{folder / 'summary.json'} is damaged: it has no status; remove it to have it written anew")
    history = History(folder / "metrics.jsonl")
    history.reread()
    return Result(folder, summary, history)


def summarise(run: Run, config: RunConfig) -> dict[str, Any]:
    """What a reader wants to know first."""
    last = run.history.rows[-1] if len(run.history) else {}
    accuracies, norms = run.history["accuracy"], run.history["grad_norm"]
    best = max(accuracies, default=None)
    return {
        "status": "finished" if run.finished else "interrupted" if run.stopped == "interrupted" else "stopped",
        "stopped": run.stopped,
        "privacy": run.privacy.to_dict() if run.privacy is not None else None,
        "round": run.state.round,
        "rounds": run.rounds,
        "final": last,
        "best_accuracy": best,
        "best_accuracy_round": run.history.rounds("accuracy")[accuracies.index(best)] if best is not None else None,
        "smallest_grad_norm": min(norms, default=None),
        "clients": len(run.state.memory),
        "dimension": len(run.x),
        "engine": run.engine,
        "device": device_name(run.x.device),
        "timings": {part: round(seconds, 4) for part, seconds in run.timings.items()},
        **_setting(config),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


class _Keeper(Callback):
    """Writes config.toml when the first gradients are known to be finite, so never for a run that cannot start."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._config = folder, config

    def begin(self, first_round: int, rounds: int) -> None:  # noqa: ARG002
        path = self._folder / "config.toml"
        if not path.exists():
            write_atomic(path, to_toml(self._config))


def _same_run(folder: Path, config: RunConfig) -> Result | None:
    """The run already in the folder, None if there is none yet; another configuration's is refused."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; a run needs a folder")
    path = folder / "config.toml"
    if not path.exists():
        if any(entry.name != ".lock" and entry.suffix != ".part" for entry in folder.iterdir()):
            raise UsageError(f"{folder} exists and is not a run (it has no config.toml); choose another folder")
        return None
    held = load(path)
    for key in sorted(RunConfig.model_fields.keys() - set(ELSEWHERE)):
        here, there = getattr(config, key), getattr(held, key)
        if here != there:
            raise UsageError(
                f"{folder} holds a run of another configuration: {key} is {there!r} there, {here!r} here; "
                "choose another folder with --out"
            )
    return read(folder) if (folder / "summary.json").exists() else None


def _setting(config: RunConfig) -> dict[str, Any]:
    versions = {"normec": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"config": config.model_dump(exclude_none=True), "versions": versions}


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
