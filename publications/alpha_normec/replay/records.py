"""What is kept of a finished cell: one small JSON file, whole or absent, that says how to make it again.

Accuracies are in percent. A record is known by its cell's name and holds the cell's configuration; one whose
configuration is not the plan's is refused, for it is the result of something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from normec.errors import UsageError
from normec.experiments.sweep import Outcome
from normec.system.files import write_atomic

from ..figures.protocol import Protocol
from ..figures.results import Results
from .plan import Planned

Record = dict[str, Any]
FOLDER = "cells"
DONE = ("finished", "diverged")
PRIVACY = ("epsilon", "delta", "sigma", "releases", "is_target", "statement")
KEYS = (
    "name",
    "part",
    "status",
    "config",
    "final",
    "best",
    "curve",
    "seed",
    "seconds",
    "together",
    "device",
    "versions",
    "command",
)


def made(cell: Planned, outcome: Outcome, base: Protocol, together: int = 1) -> Record:
    """The record of a cell that ran to its end, or diverged on the way; at most `together` at a time on its device."""
    summary, history = outcome.summary, outcome.history
    curve = _curve(outcome, base)
    best: dict[str, Any] = {}
    for column in ("test", "held_out"):
        known = [
            (value, epoch) for value, epoch in zip(curve[column], curve["epoch"], strict=True) if value is not None
        ]
        value, epoch = max(known, key=lambda one: (one[0], -one[1]), default=(None, None))
        best |= {column: value, f"{column}_epoch": epoch}
    ended, privacy = outcome.status == "finished", summary.get("privacy")
    versions = {**summary.get("versions", {}), "cuda": torch.version.cuda}
    return {
        "name": cell.name,
        "part": cell.part,
        "reading": cell.reading,
        "status": outcome.status,
        "error": outcome.error,
        "seed": cell.seed,
        "final": {column: curve[column][-1] if ended else None for column in ("test", "held_out", "loss")},
        "best": best,
        "privacy": {key: privacy[key] for key in PRIVACY} if privacy is not None else None,
        "command": f"normec replay run {cell.name}",
        "device": summary.get("device"),
        "engine": summary.get("engine"),
        "seconds": summary.get("timings", {}).get("total"),
        "together": together,
        "messages": history.rows[-1]["messages"] if len(history) else 0,
        "versions": versions,
        "config": cell.config.known_by(),
        "curve": curve,
    }


def _curve(outcome: Outcome, base: Protocol) -> dict[str, list[Any]]:
    """Epoch by epoch: accuracy on the test set and on the records held out, training loss."""
    test = Results(base.model_copy(update={"accuracy": "test"}), []).curve(outcome)
    held_out = Results(base.model_copy(update={"accuracy": "held-out"}), []).curve(outcome)
    return {
        "epoch": test.rounds,
        "test": [_short(value, 2) for value in test.accuracy],
        "held_out": [_short(value, 2) for value in held_out.accuracy],
        "loss": [_short(value, 4) for value in test.loss],
    }


def _short(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def write(folder: Path, record: Record) -> Path:
    """One file, the curve's lists a line each."""
    folder.mkdir(parents=True, exist_ok=True)
    curve = ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in record["curve"].items())
    head = json.dumps({key: value for key, value in record.items() if key != "curve"}, indent=1)
    path = folder / f"{record['name']}.json"
    write_atomic(path, f'{head[:-2]},\n "curve": {{\n{curve}\n }}\n}}\n')
    return path


def parse(text: str, where: str, cells: Mapping[str, Planned]) -> Record:
    """A record that fits the plan; what does not is refused, naming what differs."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; remove it") from None
    missing = [key for key in KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise UsageError(f"{where} is no record of the replay: it has no {missing[0]!r}; remove it")
    cell = cells.get(record["name"])
    if cell is None:
        raise UsageError(
            f"{where} is of {record['name']!r}, which is not in the plan (`normec replay list`); remove it"
        )
    wanted, held = cell.config.known_by(), record["config"]
    for key in sorted({*wanted, *held}):
        if wanted.get(key) != held.get(key):
            raise UsageError(
                f"{where} is of another configuration than {cell.name}: {key} is {held.get(key)!r} there, "
                f"{wanted.get(key)!r} in the plan; run the cell again"
            )
    if record["status"] not in DONE:
        raise UsageError(f"{where} is of a cell that is {record['status']!r}, not done; run it again")
    return dict(record)


def read(folder: Path, cells: Sequence[Planned]) -> dict[str, Record]:
    """All records in a folder, by name, in the plan's order."""
    known = {cell.name: cell for cell in cells}
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = parse(path.read_text(encoding="utf-8"), str(path), known)
        if path.stem != record["name"]:
            raise UsageError(f"{path} holds the record of {record['name']}; give it that name")
        found[record["name"]] = record
    return {name: found[name] for name in known if name in found}
