"""Records made on another machine, from a folder or a packed one, taken in where they fit the plan.

Everything is looked at before anything is written: one record that does not fit refuses the lot.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from benchmarks.privacy import work
from benchmarks.privacy.studies import STUDIES
from normec.errors import UsageError

from . import records
from .plan import Planned

LARGEST = 4_000_000  # bytes of a file that may be a record
HONEST = "honest"


def collect(source: Path, folder: Path, cells: Sequence[Planned], replace: bool = False) -> list[str]:
    """Merge the records in `source` into `folder`; returns the names of those that are new.

    A record that is here already stays, and must be the same unless `replace` is given.
    """
    known = {cell.name: cell for cell in cells}
    found: dict[str, records.Record] = {}
    lines: dict[str, list[work.Record]] = {}
    for name, text in _texts(source):
        where = f"{source}: {name}"
        if name.endswith(".json"):
            record = records.parse(text, where, known)
            found[record["name"]] = record
        else:
            study = PurePosixPath(name).name.removesuffix(".jsonl")
            lines[study] = [work.parse(STUDIES[study], line, where) for line in text.splitlines()]
    if not found and not lines:
        raise UsageError(f"{source} holds no records: files NAME.json, or {', '.join(STUDIES)} as .jsonl")
    here = records.read(folder / records.FOLDER, cells)
    for name, record in found.items():
        if name in here and here[name] != record and not replace:
            raise UsageError(f"{name} is here already, with other numbers; keep it, or give --replace")
    new = [name for name, record in found.items() if here.get(name) != record]
    for name in new:
        records.write(folder / records.FOLDER, found[name])
    return new + [name for study, held in lines.items() for name in _merge(study, held, folder / HONEST, replace)]


def _merge(name: str, held: Sequence[work.Record], folder: Path, replace: bool) -> list[str]:
    study = STUDIES[name]
    here = {work.place_of(one): one for one in work.read(study, folder)}
    new = []
    for record in held:
        place = work.place_of(record)
        if place in here and here[place] != record and not replace:
            raise UsageError(f"{name}, {place.key} is here already, with other numbers; keep it, or give --replace")
        if here.get(place) != record:
            here[place] = record
            new.append(f"{name}/{place.key}")
    if new:
        folder.mkdir(parents=True, exist_ok=True)
        work.write(study, folder, here.values())
    return new


def _texts(source: Path) -> Iterator[tuple[str, str]]:
    """Names and contents of the files that may be records; archives are read, never unpacked."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and _wanted(path.relative_to(source).as_posix()):
                yield path.relative_to(source).as_posix(), path.read_text(encoding="utf-8")
        return
    if not source.exists():
        raise UsageError(f"there is no {source}; give a folder of records, or one packed as .tgz")
    try:
        with tarfile.open(source) as packed:
            for member in packed:
                if not member.isfile() or not _wanted(member.name):
                    continue
                if member.size > LARGEST:
                    raise UsageError(
                        f"{source}: {member.name} has {member.size} bytes, more than any record; remove it"
                    )
                stream = packed.extractfile(member)
                yield member.name, stream.read().decode("utf-8") if stream is not None else ""
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} cannot be read as a packed folder: {error}") from None


def _wanted(name: str) -> bool:
    """Records lie in a folder `cells` or on top, lines of studies in files of their names; all else is passed by."""
    path = PurePosixPath(name)
    if path.suffix == ".jsonl":
        return path.stem in STUDIES
    return path.suffix == ".json" and path.parent.name in ("", ".", records.FOLDER)
