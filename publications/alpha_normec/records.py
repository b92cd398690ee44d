"""Records of finished cells: one small JSON file per cell, in `FOLDER/records/cells`.

Accuracies are in percent. A record has the name and the configuration of its cell, its curve, and the command that
makes it again. A record whose configuration differs from the plan's is refused: it is the result of another experiment.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from normec import UsageError
from normec.experiments.sweep import Outcome
from normec.system.files import unpacked, write_atomic

from .plan import Cell
from .protocol import Protocol, extent

Record = dict[str, Any]
FOLDER = Path("records") / "cells"
DONE = ("finished", "diverged")
PRIVACY = ("epsilon", "delta", "sigma", "releases", "is_target", "statement")
KEYS = (
    "name",
    "part",
    "status",
    "error",
    "config",
    "final",
    "best",
    "privacy",
    "curve",
    "seed",
    "seconds",
    "together",
    "device",
    "versions",
    "command",
)


def make(cell: Cell, outcome: Outcome, base: Protocol, together: int = 1) -> Record:
    """The record of a cell that finished or diverged; at most `together` cells shared its device."""
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
        "command": f"python -m publications.alpha_normec run {cell.name}",
        "device": summary.get("device"),
        "engine": summary.get("engine"),
        "seconds": summary.get("timings", {}).get("total"),
        "together": together,
        "messages": history.rows[-1]["messages"] if len(history) else 0,
        "versions": versions,
        "config": cell.config.identity_settings(),
        "curve": curve,
    }


def _curve(outcome: Outcome, base: Protocol) -> dict[str, list[Any]]:
    """By communication round: accuracies at its end, and the mean training loss over its steps."""
    steps, history = extent(base).steps, outcome.history
    losses: dict[int, list[float]] = {}
    for k, loss in zip(history.rounds("loss"), history["loss"], strict=True):
        losses.setdefault(k // steps + 1, []).append(loss)
    test, held_out = (
        {k // steps: 100 * value for k, value in zip(history.rounds(column), history[column], strict=True)}
        for column in ("accuracy", "validation_accuracy")
    )
    rounds = sorted(test)
    return {
        "epoch": rounds,
        "test": [_short(test[k], 2) for k in rounds],
        "held_out": [_short(held_out.get(k), 2) for k in rounds],
        "loss": [_short(statistics.fmean(losses[k]), 4) if k in losses else None for k in rounds],
    }


def _short(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def write(folder: Path, record: Record) -> Path:
    """Write one file, with one line per list of the curve."""
    path = folder / FOLDER / f"{record['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    curve = ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in record["curve"].items())
    head = json.dumps({key: value for key, value in record.items() if key != "curve"}, indent=1)
    write_atomic(path, f'{head[:-2]},\n "curve": {{\n{curve}\n }}\n}}\n')
    return path


def parse(text: str, where: str, cells: Mapping[str, Cell]) -> Record:
    """Parse a record.

    Raises:
        UsageError: The text is no record, or the record does not fit the plan; the message names what differs.
    """
    try:
        record = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; remove it") from None
    missing = [key for key in KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise UsageError(f"{where} is no record of a cell: it has no {missing[0]!r}; remove it")
    cell = cells.get(record["name"])
    if cell is None:
        raise UsageError(
            f"{where} is of {record['name']!r}, which is not in the plan "
            "(`python -m publications.alpha_normec list`); remove it"
        )
    key = difference(cell, record)
    if key is not None:
        raise UsageError(
            f"{where} is of another configuration than {cell.name}: {key} is {record['config'].get(key)!r} there, "
            f"{cell.config.identity_settings().get(key)!r} in the plan; run the cell again, or give another --folder"
        )
    if record["status"] not in DONE:
        raise UsageError(f"{where} is of a cell whose status is {record['status']!r}; run it again")
    return dict(record)


def difference(cell: Cell, record: Record) -> str | None:
    """The first setting in which the configurations of a cell and of a record differ."""
    wanted, held = cell.config.identity_settings(), record["config"]
    return next((key for key in sorted({*wanted, *held}) if wanted.get(key) != held.get(key)), None)


def read(folder: Path, cells: Sequence[Cell], skip_others: bool = False) -> dict[str, Record]:
    """All records of a folder, by name, in the order of the plan.

    Args:
        folder: The folder that holds `records/cells`.
        cells: The plan.
        skip_others: Leave out records of other configurations and unknown cells instead of refusing them.
    """
    known = {cell.name: cell for cell in cells}
    found = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        text = path.read_text(encoding="utf-8")
        if skip_others and _is_of_another_plan(text, known.get(path.stem)):
            continue
        record = parse(text, str(path), known)
        if path.stem != record["name"]:
            raise UsageError(f"{path} holds the record of {record['name']}; rename it")
        found[record["name"]] = record
    return {name: found[name] for name in known if name in found}


def _is_of_another_plan(text: str, cell: Cell | None) -> bool:
    """Whether a record is of an unknown cell or of another configuration; what is no record is left to `parse`."""
    try:
        record = json.loads(text)
    except ValueError:
        return False
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        return False
    return cell is None or difference(cell, record) is not None


def collect(source: Path, folder: Path, cells: Sequence[Cell], replace: bool = False) -> list[str]:
    """Copy the records of another machine into `folder`; all of them are checked before anything is written.

    Args:
        source: A folder of records, or an archive of one. Other files in it are ignored.
        folder: The folder that holds `records/cells`.
        cells: The plan.
        replace: Replace records that are already there with different content.

    Returns:
        The names of the new records.

    Raises:
        UsageError: There are no records, or one of them does not fit the plan or the records that are there.
    """
    known = {cell.name: cell for cell in cells}
    with unpacked(source) as opened:
        paths = [path for path in sorted(opened.rglob("*.json")) if path.parent in (opened, *opened.rglob("cells"))]
        texts = {path.relative_to(opened).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    found = [parse(text, f"{source}: {name}", known) for name, text in texts.items()]
    if not found:
        raise UsageError(f"{source} has no records; they are files NAME.json, in it or in a folder cells")
    here = read(folder, cells)
    for record in found:
        if here.get(record["name"], record) != record and not replace:
            raise UsageError(f"{record['name']} is here already with other numbers; keep it, or give --replace")
    new = [record for record in found if here.get(record["name"]) != record]
    for record in new:
        write(folder, record)
    return [record["name"] for record in new]
