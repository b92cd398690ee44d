"""Studies under way: cell by cell, kept as they come, for as long as there is time.

OUT/STUDY.jsonl         one line a finished cell
OUT/STUDY.part.jsonl    runs of the cell under way; gone when the study is done
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from normec import __version__
from normec.errors import UsageError, at_least, nearest
from normec.experiments import build, runs
from normec.system.files import write_atomic

from . import tuned
from .studies import Place, Study
from .trial import Found

Record = dict[str, Any]
TOLD = ("study", "method", "epsilon", "split")


def run(
    studies: Sequence[Study],
    out: Path,
    limit_seconds: float | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
    together: int = 1,
    cells: Sequence[str] = (),
) -> bool:
    """Fill `out` until all is done (True) or the time is up (False); no run is begun after `limit_seconds`.

    On a GPU `together` runs take turns; the records are the same. `cells`: keys of those to be run, all if none.
    """
    at_least(1, together=together)
    build.device(device)
    for study, key in itertools.product(studies, cells):
        keys = [place.key for place in study.cells()]
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
    time_is_up: Callable[[], bool],
    together: int,
    cells: Sequence[str],
) -> bool:
    done = {place_of(one): one for one in read(study, out)}
    part = out / f"{study.name}.part.jsonl"
    kept = _parts(part)
    for place in study.cells():
        if place in done or (cells and place.key not in cells):
            continue
        known: dict[str, Found] = {one["run"]: one["found"] for one in kept if one["cell"] == place.key}

        def keep(key: str, found: Found, place: Place = place) -> None:
            kept.append({"cell": place.key, "run": key, "found": found})
            with part.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept[-1]) + "\n")

        started = time.monotonic()
        where = {**study.where(place), "device": device}
        try:
            found = tuned.cell(place.method, where, study.effort, known, keep, time_is_up, together)
        except tuned.Stopped:
            return False
        done[place] = {**study.asked(place), **found, **_made(device, time.monotonic() - started)}
        write(study, out, done.values())
        report(f"{study.name}  {place.split}  ε = {place.epsilon:g}  {place.method}: {percent(done[place])}")
    if len(done) == len(study.cells()):
        part.unlink(missing_ok=True)
    return True


def read(study: Study, out: Path) -> list[Record]:
    """The finished cells of a study, those of its plan; a line of another plan is refused."""
    path = out / f"{study.name}.jsonl"
    if not path.exists():
        return []
    return [parse(study, line, str(path)) for line in path.read_text(encoding="utf-8").splitlines()]


def parse(study: Study, line: str, where: str) -> Record:
    """A record that fits its study; one whose settings are not those of the study's cell is refused."""
    try:
        record: Record = json.loads(line)
        place = place_of(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where} has a line that is no record of {study.name}: {error!r}; remove it") from None
    if place not in study.cells():
        raise UsageError(
            f"{study.name} has no cell {place.key}; its cells are over {study.epsilons} and {study.splits}"
        )
    for name, value in study.asked(place).items():
        if record.get(name) != value:
            raise UsageError(
                f"{study.name}, {place.key}: {name} is {record.get(name)!r} in the record, {value!r} in the study; "
                "run the cell again"
            )
    if record.get("chosen") not in study.effort.settings(place.method):
        raise UsageError(f"{study.name}, {place.key}: {record.get('chosen')} is no setting of the study; run it again")
    return record


def write(study: Study, out: Path, records: Iterable[Record]) -> None:
    """All records of a study, in the order of its cells."""
    order = {place: number for number, place in enumerate(study.cells())}
    lines = sorted(records, key=lambda one: order[place_of(one)])
    write_atomic(out / f"{study.name}.jsonl", "".join(json.dumps(one) + "\n" for one in lines))


def place_of(record: Record) -> Place:
    return Place(*(record[name] for name in TOLD))


def percent(record: Record) -> str:
    return f"{100 * record['accuracy']:.1f} ± {100 * record['spread']:.1f}"


def _made(device: str, seconds: float) -> Record:
    versions = {"normec": __version__, "torch": torch.__version__}
    return {"seconds": round(seconds, 1), "device": runs.device_name(build.device(device)), "versions": versions}


def _parts(path: Path) -> list[Record]:
    """Runs measured before a stop; a line cut off by a kill is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
