"""Records of finished cells: FOLDER/STUDY.jsonl has one line per cell.

A record has the settings of its cell, the chosen setting and the tried ones, and the results. A record whose settings
differ from those of the study is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normec import UsageError
from normec.system.files import unpacked, write_atomic

from .studies import NO_NOISE, STUDIES, Cell, Study

Record = dict[str, Any]


def read(study: Study, folder: Path) -> list[Record]:
    """The records of a study; a record that does not fit the study is refused."""
    path = folder / f"{study.name}.jsonl"
    if not path.exists():
        return []
    return [parse(study, line, str(path)) for line in path.read_text(encoding="utf-8").splitlines()]


def parse(study: Study, line: str, where: str) -> Record:
    """Parse a record.

    Raises:
        UsageError: The line is no record, or its settings differ from those of the study.
    """
    try:
        record: Record = json.loads(line)
        cell = cell_of(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where} has a line that is no record of {study.name}: {error!r}; remove it") from None
    if cell not in study.cells():
        raise UsageError(
            f"{where} has a record of {cell.key}, which is no cell of {study.name}; remove its line, or add its "
            "method, ε and split to the study"
        )
    for name, value in study.expected(cell).items():
        if record.get(name) != value:
            raise UsageError(
                f"{study.name}, {cell.key}: {name} is {record.get(name)!r} in the record, {value!r} in the study; "
                f"remove its line from {where}, and run the cell again"
            )
    if record.get("chosen") not in study.budget.settings(study.contender(cell.method)):
        raise UsageError(
            f"{study.name}, {cell.key}: {record.get('chosen')} is not among the settings that the study tries; remove "
            f"its line from {where}, and run the cell again"
        )
    return record


def write(study: Study, folder: Path, records: Iterable[Record]) -> None:
    """Write all records of a study, in the order of its cells."""
    order = {cell: number for number, cell in enumerate(study.cells())}
    folder.mkdir(parents=True, exist_ok=True)
    lines = sorted(records, key=lambda one: order[cell_of(one)])
    write_atomic(folder / f"{study.name}.jsonl", "".join(json.dumps(one) + "\n" for one in lines))


def cell_of(record: Record) -> Cell:
    """The cell of a record, whose ε is None if its runs had no noise."""
    epsilon = NO_NOISE if record["epsilon"] is None else record["epsilon"]
    return Cell(record["study"], record["method"], epsilon, record["split"])


def percent(record: Record) -> str:
    """The test value of a record, as mean ± standard deviation in percent."""
    return f"{100 * record['accuracy']:.1f} ± {100 * record['spread']:.1f}"


def collect(source: Path, folder: Path, replace: bool = False) -> list[str]:
    """Merge the records of another machine into `folder`; all of them are checked before anything is written.

    Args:
        source: A folder with files STUDY.jsonl, or an archive of one. Other files in it are ignored.
        folder: The folder of the records.
        replace: Replace records that are already there with different content.

    Returns:
        The new records, as STUDY/CELL.

    Raises:
        UsageError: There are no records, or one of them does not fit its study or the records that are there.
    """
    with unpacked(source) as opened:
        paths = [path for path in sorted(opened.rglob("*.jsonl")) if path.stem in STUDIES]
        found = {
            path.stem: [parse(STUDIES[path.stem], line, f"{source}: {path.name}") for line in _lines(path)]
            for path in paths
        }
    if not found:
        raise UsageError(f"{source} has no records; they are files {', '.join(STUDIES)} with the suffix .jsonl")
    merged = {name: {cell_of(one): one for one in read(STUDIES[name], folder)} for name in found}
    new = []
    for name, held in found.items():
        for record in held:
            cell = cell_of(record)
            if merged[name].get(cell, record) != record and not replace:
                raise UsageError(f"{name}, {cell.key} is here already with other numbers; keep it, or give --replace")
            if merged[name].get(cell) != record:
                merged[name][cell] = record
                new.append(f"{name}/{cell.key}")
    for name, held_by_cell in merged.items():
        write(STUDIES[name], folder, held_by_cell.values())
    return new


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
