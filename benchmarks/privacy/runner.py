"""Run cells of studies until they are finished or a time limit is reached.

FOLDER/STUDY.jsonl                    one line per finished cell
FOLDER/parts/STUDY.HASH.part.jsonl    the finished runs of an unfinished cell; removed when the cell is finished
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from normec import __version__
from normec.errors import at_least
from normec.experiments import build
from normec.training.summary import device_name

from . import tuning
from .records import Record, cell_of, percent, read, write
from .studies import STUDIES, Cell, Study, shown
from .trial import Measurement

_LOCAL_STEPS = 8  # how much longer a round with local steps takes, about


def run(
    cells: Mapping[str, Sequence[Cell]],
    out: Path,
    limit_seconds: float | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
    together: int = 1,
    processes: int = 1,
    studies: Mapping[str, Study] = STUDIES,
) -> bool:
    """Run the cells that have no record.

    Args:
        cells: The cells, by study.
        out: The folder of the records.
        limit_seconds: Start no run after this time.
        device: The device of the runs.
        report: Called with a line for every finished cell.
        together: Runs that take turns on a GPU; the records do not depend on it.
        processes: Cells that run at the same time, each in a process with one thread.
        studies: The studies.

    Returns:
        Whether all cells are finished; False if the time limit was reached.
    """
    at_least(1, together=together, processes=processes)
    build.device(device)
    done = {name: {cell_of(one): one for one in read(studies[name], out)} for name in cells}
    left = [(studies[name], cell) for name, held in cells.items() for cell in held if cell not in done[name]]
    end = time.time() + limit_seconds if limit_seconds is not None else None
    seconds = sum(estimate(*one) for one in left)
    count = sum(map(len, cells.values()))
    report(f"{len(left)} of {count} cells are left, {duration(seconds)} of one process or GPU")

    def keep(study: Study, cell: Cell, record: Record | None) -> bool:
        if record is None:
            return False
        done[study.name][cell] = record
        write(study, out, done[study.name].values())
        _part_file(out, cell).unlink(missing_ok=True)
        report(
            f"{study.name}  {cell.split}  {shown(cell.epsilon)}  {cell.method}: {percent(record)} (standard deviation)"
        )
        return True

    if processes == 1:
        return all(keep(study, cell, _cell(study, cell, out, device, end, together)) for study, cell in left)
    finished = True
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        futures = {
            pool.submit(_cell, study, cell, out, device, end, together): (study, cell)
            for study, cell in sorted(left, key=lambda one: -estimate(*one))
        }
        failed: list[BaseException] = []
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                finished &= keep(*futures[future], future.result())
            else:  # the records of other cells are written first
                study, cell = futures[future]
                report(f"{study.name}  {cell.split}  {shown(cell.epsilon)}  {cell.method}: {_first_line(error)}")
                failed.append(error)
    if failed:
        raise failed[0]
    return finished


def duration(seconds: float) -> str:
    """A duration in words, rounded to minutes."""
    minutes = round(seconds / 60)
    return "less than a minute" if minutes < 1 else f"about {minutes} minute{'s' * (minutes > 1)}"


def estimate(study: Study, cell: Cell) -> float:
    """About how many seconds a cell takes."""
    contender = study.contender(cell.method)
    return study.budget.run_rounds(contender) * study.seconds_per_round * (_LOCAL_STEPS if contender.local else 1)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _cell(study: Study, cell: Cell, out: Path, device: str, end: float | None, together: int) -> Record | None:
    """The record of a cell; None if the time limit was reached."""
    part = _part_file(out, cell)
    held = _finished_runs(part)
    known: dict[str, Measurement] = {one["run"]: one["found"] for one in held}
    seconds = sum(one["seconds"] for one in held)
    last = time.monotonic()

    def keep(key: str, found: Measurement) -> None:
        nonlocal seconds, last
        now = time.monotonic()
        took, last = now - last, now
        seconds += took
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": key, "found": found, "seconds": took}) + "\n")

    shared = {**study.shared_settings(cell), "device": device}
    try:
        found = tuning.tune_and_test(
            study.contender(cell.method),
            shared,
            study.budget,
            known,
            keep,
            lambda: end is not None and time.time() >= end,
            together,
        )
    except tuning.Stopped:
        return None
    return {**study.expected(cell), **found, **_origin(device, seconds)}


def _origin(device: str, seconds: float) -> Record:
    """The computing time, the device and the versions of a record."""
    versions = {"normec": __version__, "torch": torch.__version__}
    return {"seconds": round(seconds, 1), "device": device_name(build.device(device)), "versions": versions}


def _part_file(out: Path, cell: Cell) -> Path:
    return out / "parts" / f"{cell.study}.{hashlib.sha256(cell.key.encode()).hexdigest()[:12]}.part.jsonl"


def _finished_runs(path: Path) -> list[Record]:
    """Runs that were measured before an interruption; an incomplete last line is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
