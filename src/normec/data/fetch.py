"""`normec data get`: download a data set into the cache and verify it; it is installed completely or not at all.

Everything happens in a temporary folder next to the target: fetch, decode, checksum. Only then are the files
renamed into place, one atomic rename each, and a set counts as present only when all are there; a process
that is killed leaves at worst a dot-folder, which the next `get` removes after a day.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path

from ..errors import UsageError, one_of
from .checksum import verify
from .cifar import ARCHIVE, decode_archive, decode_strips
from .entries import ENTRIES, FILE_PREFIX, Entry
from .folders import by_hand, cache_folder, locate
from .origins import Report, Unavailable

STALE = 24 * 3600.0


def _silent(_: str) -> None:
    """The default report."""


def get(name: str, data_dir: str | Path | None = None, report: Report = _silent) -> Path | None:
    """Download a data set, unless it is already there, and verify its files.

    A set that is present, in `data_dir` or in the cache, is only verified. Sets inside scikit-learn need nothing.

    Args:
        name: The name of the data set.
        data_dir: The folder to put it in (default: the cache).
        report: Called with a line of text for each step.

    Returns:
        The folder of the files; None for sets inside scikit-learn or normec.

    Raises:
        UsageError: The name is unknown, no origin delivers the right files, or the folder cannot be written.

    Example:
        >>> get("digits", report=print)
        digits: nothing to get, it is part of scikit-learn
    """
    if name.startswith(FILE_PREFIX):
        report(f"{name}: nothing to get, it is your own file")
        return None
    one_of(ENTRIES, dataset=name)
    entry = ENTRIES[name]
    if entry.family == "embedded":
        report(f"{name}: nothing to get, it is part of scikit-learn")
        return None
    if entry.family == "heart-disease":
        report(f"{name}: nothing to get, it is part of normec")
        return None
    if present := locate(entry, data_dir):
        verify(entry, present)
        folder = next(iter(present.values())).parent
        report(f"{name}: already in {folder}, checksums agree")
        return folder
    return fetch(entry, Path(data_dir).expanduser() if data_dir is not None else cache_folder(), report)


def fetch(entry: Entry, folder: Path, report: Report = _silent) -> Path:
    """Try the origins of `entry` in order until one gives files with the right content."""
    target = folder / entry.name
    failures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_stale(folder, entry.name)
        if entry.family == "cifar10" and (target / ARCHIVE).is_file():
            report(f"decoding {target / ARCHIVE}")
            _install(entry, target, target)
            return target
        for origin in entry.origins:
            with _temporary_folder(folder, entry.name) as raw:
                try:
                    origin.fetch(Path(raw), report)
                    _install(entry, Path(raw), target)
                except (Unavailable, UsageError) as reason:
                    failures.append(f"{origin.label}: {reason}")
                    report(f"failed: {failures[-1]}")
                    continue
            report(f"{entry.name}: in {target}, checksums agree")
            return target
    except OSError as reason:
        raise UsageError(f"cannot write to {folder} ({reason}); free some space or give another data_dir") from None
    raise UsageError(
        f"{entry.name} could not be fetched. Tried: {'; '.join(failures)}. By hand: {by_hand(entry, folder)}"
    )


def _install(entry: Entry, raw: Path, target: Path) -> None:
    """Decode the fetched files, verify the content, rename into place."""
    with _temporary_folder(target.parent, entry.name) as temporary:
        ready = Path(temporary)
        if entry.family == "cifar10":
            archive = raw / ARCHIVE
            if archive.is_file():
                decode_archive(archive, ready)
            else:
                decode_strips(raw, ready)
        else:
            for file in entry.files:
                _unpack(raw, file, ready)
        files = {file: ready / file for file in entry.files}
        verify(entry, files)
        for path in files.values():
            _flush(path)
        target.mkdir(exist_ok=True)
        for file, path in files.items():
            path.replace(target / file)


def _unpack(raw: Path, file: str, ready: Path) -> None:
    plain, packed = raw / file, raw / f"{file}.gz"
    if plain.is_file():
        shutil.move(plain, ready / file)
    elif packed.is_file():
        try:
            with gzip.open(packed) as source, (ready / file).open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as reason:
            raise Unavailable(f"{packed.name} is damaged or cut short ({reason})") from None
    else:
        raise Unavailable(f"{file} is not among the downloaded files")


def _temporary_folder(folder: Path, name: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder, ignore_cleanup_errors=True)


def _flush(path: Path) -> None:
    """Sync files before the rename; otherwise a power cut can leave the name without the content."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _clear_stale(folder: Path, name: str) -> None:
    for left in folder.glob(f".{name}-*"):
        with contextlib.suppress(FileNotFoundError):  # another `get` may be clearing, too
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)
