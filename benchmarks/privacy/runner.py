"""Run studies cell by cell until they are finished or a time limit is reached.

FOLDER/STUDY.jsonl         one line per finished cell
FOLDER/STUDY.part.jsonl    the finished runs of unfinished cells; removed when the study is finished
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from normec import UsageError, __version__
from normec.errors import at_least, nearest
from normec.experiments import build
from normec.training.summary import device_name

from . import tuning
from .records import Record, cell_of, percent, read, write
from .studies import Cell, Study
from .trial import Measurement


def run(
    studies: Sequence[Study],
    out: Path,
    limit_seconds: float | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
    together: int = 1,
    cells: Sequence[str] = (),
) -> bool:
    """Run the cells of studies that have no record.

    Args:
        studies: The studies.
        out: The folder of the records.
        limit_seconds: Start no run after this time.
        device: The device of the runs.
        report: Called with a line for every finished cell.
        together: Runs that take turns on a GPU; the records do not depend on it.
        cells: Keys of the cells to run (default: all).

    Returns:
        Whether all cells are finished; False if the time limit was reached.
    """
    at_least(1, together=together)
    build.device(device)
    for study, key in itertools.product(studies, cells):
        keys = [cell.key for cell in study.cells()]
        if key not in keys:
            raise UsageError(f"{study.name} has no cell {key!r}{nearest(key, keys)}; they are like {keys[0]!r}")
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_seconds if limit_seconds is not None else None
    return all(
        _study(study, out, device, report, lambda: end is not None and time.monotonic() >= end, together, cells)
        for study in studies
    )


def _study(
    study: Study,
    out: Path,
    device: str,
    report: Callable[[str], None],
    time_is_over: Callable[[], bool],
    together: int,
    cells: Sequence[str],
) -> bool:
    done = {cell_of(one): one for one in read(study, out)}
    part = out / f"{study.name}.part.jsonl"
    kept = _parts(part)
    for cell in study.cells():
        if cell in done or (cells and cell.key not in cells):
            continue
        known: dict[str, Measurement] = {one["run"]: one["found"] for one in kept if one["cell"] == cell.key}

        def keep(key: str, found: Measurement, cell: Cell = cell) -> None:
            kept.append({"cell": cell.key, "run": key, "found": found})
            with part.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept[-1]) + "\n")

        started = time.monotonic()
        shared = {**study.shared_settings(cell), "device": device}
        try:
            found = tuning.tune_and_test(cell.method, shared, study.budget, known, keep, time_is_over, together)
        except tuning.Stopped:
            return False
        done[cell] = {**study.expected(cell), **found, **_origin(device, time.monotonic() - started)}
        write(study, out, done.values())
        report(f"{study.name}  {cell.split}  ε = {cell.epsilon:g}  {cell.method}: {percent(done[cell])}")
    if len(done) == len(study.cells()):
        part.unlink(missing_ok=True)
    return True


def _origin(device: str, seconds: float) -> Record:
    """The computing time, the device and the versions of a record."""
    versions = {"normec": __version__, "torch": torch.__version__}
    return {"seconds": round(seconds, 1), "device": device_name(build.device(device)), "versions": versions}


def _parts(path: Path) -> list[Record]:
    """Runs that were measured before an interruption; an incomplete last line is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
