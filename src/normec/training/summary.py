"""The files about a run's result: summary.json, report.html, clients.json and model.safetensors."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import __version__
from ..errors import Diverged, UsageError, needed
from ..storage.checkpoint import save_tensors
from ..storage.history import NOT_COVERED, History, uncovered
from ..storage.run_folder import CONFIG, MODEL
from ..system.files import read_bytes, read_json, to_toml, write_atomic, writing

if TYPE_CHECKING:
    from .run import Run

LEDGER = "ledger.jsonl"


def keep_result(run: Run, ranks: int = 1) -> None:
    """Write the files about the result of a run from Python, if it has a folder; those of a finished run stay.

    Args:
        run: The run, finished or not.
        ranks: The number of processes that shared the clients.
    """
    if run.folder is not None and not (run.finished and _complete(run.folder, run.rounds)):
        _write_result(run.folder, run, {"ranks": ranks} if ranks > 1 else {})


def save_run(run: Run, folder: Path) -> Path:
    """Write a run to a new folder, without a checkpoint; see `Run.save`."""
    if not run.settings:
        raise UsageError("this run does not know its settings and cannot be saved; only rank 0 of a job can save it")
    needed("safetensors")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; give a new folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if run.payments is not None:
            run.payments.write(folder / LEDGER)
        elif run.privacy is not None and run.folder is not None:
            for name in (LEDGER, f"{LEDGER}.head"):
                write_atomic(folder / name, read_bytes(run.folder / name), private=True)
    write_atomic(folder / CONFIG, to_toml(run.settings))
    history = History(folder / "metrics.jsonl", private=run.privacy is not None)
    for row in run.history:
        history.append(row)
    history.flush()
    _write_result(folder, run, {})
    return folder


def _complete(folder: Path, rounds: int) -> bool:
    """Whether a folder has all files about the result of a finished run of that many rounds."""
    try:
        summary = read_json(folder / "summary.json")
    except (FileNotFoundError, UsageError):
        return False
    whole = (folder / MODEL).exists() and (folder / "report.html").exists()
    return (
        whole and isinstance(summary, dict) and (summary.get("status"), summary.get("rounds")) == ("finished", rounds)
    )


def _write_result(folder: Path, run: Run, facts: Mapping[str, Any]) -> None:
    write_tables(folder, run)
    write_summary(folder, {**summarise(run, run.settings), **facts})


def write_tables(folder: Path, run: Run) -> None:
    """Write the final model and, where the run measured them, the clients."""
    write_atomic(folder / MODEL, lambda aside: save_tensors(model_tensors(run), aside))
    if run.clients:
        table: dict[str, Any] = {"columns": list(run.clients), "rows": list(zip(*run.clients.values(), strict=True))}
        if run.privacy is not None:
            table["note"] = NOT_COVERED
        write_atomic(folder / "clients.json", json.dumps(table) + "\n", private=run.privacy is not None)


def model_tensors(run: Run) -> dict[str, Tensor]:
    """Return the tensors of the final model under the names of its `state_dict`; "x" where there is no module.

    Every name has a tensor of its own, also where parameters are shared, so that `load_state_dict` finds all of them.
    """
    held = {"x": run.x} if run.model is None else run.model.state_dict()
    return {name: value.detach().cpu().contiguous().clone() for name, value in held.items()}


def record_divergence(settings: Mapping[str, Any], folder: Path, error: Diverged) -> None:
    """Record in its folder that a run diverged, if the run has begun to write there."""
    if (folder / CONFIG).exists():
        record_end(settings, folder, {"status": "diverged", "round": error.round, "error": str(error)})


def record_end(settings: Mapping[str, Any], folder: Path, facts: dict[str, Any]) -> None:
    """Record in its folder that a run ended without a result; `facts` are its status and the reason."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():
        write_atomic(folder / CONFIG, to_toml(settings))
    history = History(folder / "metrics.jsonl")
    history.reread()
    write_summary(folder, {**facts, **_recorded(settings), "final": history.rows[-1] if len(history) else {}})


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
        "majority": run.majority if best is not None else None,
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


def _recorded(settings: Mapping[str, Any]) -> dict[str, Any]:
    versions = {"normec": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"config": dict(settings), "versions": versions}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write the page and then the summary, so that a run with a summary has a page.

    Only the owner can read them if they show what no noise covers.
    """
    from ..report import page

    page.write_run(folder, summary)
    text = json.dumps(summary, indent=1) + "\n"
    write_atomic(folder / "summary.json", text, private=bool(uncovered(summary["final"])))
