"""The folders in which data files are searched, and the data sets that are present: the user's folder, then the cache.

The user's folder is the `data_dir` argument or, without it, the environment variable NORMEC_DATA. A set counts
as present only if all of its files are in one folder; they may be plain or compressed, at the top or in a
sub-folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError
from .entries import ENTRIES, Entry, Family
from .origins import Download

VARIABLE = "NORMEC_DATA"

# MNIST and Fashion-MNIST share their file names, so their files are never taken from a flat folder unless it
# is called after the set; torchvision's layout is understood.
_SUBFOLDERS: dict[Family, tuple[str, ...]] = {
    "embedded": (),
    "heart-disease": (),
    "libsvm": ("", "{name}", "libsvm"),
    "idx": ("{name}",),
    "cifar10": ("{name}",),
}
_TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
_SUFFIXES: dict[Family, tuple[str, ...]] = {
    "embedded": (),
    "heart-disease": (),
    "libsvm": ("", ".gz", ".bz2"),
    "idx": ("", ".gz"),
    "cifar10": ("",),
}


def cache_folder() -> Path:
    """XDG_CACHE_HOME/normec, by default ~/.cache/normec."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "normec"


def search_folders(data_dir: str | Path | None = None) -> list[Path]:
    """The folders to search, in order."""
    given = str(data_dir) if data_dir is not None else os.environ.get(VARIABLE, "")
    folders = [Path(given).expanduser()] if given else []
    return [*folders, cache_folder()]


def locate(entry: Entry, data_dir: str | Path | None = None) -> dict[str, Path] | None:
    """The paths of all files of the data set, or None if no folder contains them all."""
    for folder in search_folders(data_dir):
        for candidate in _candidates(entry, folder):
            found = {file: path for file in entry.files if (path := _file(entry, candidate, file))}
            if entry.files and len(found) == len(entry.files):
                return found
    return None


def missing(entry: Entry, data_dir: str | Path | None = None) -> str:
    """The error text for a missing data set: the folders that were searched, and both ways to get it."""
    looked = ", ".join(str(f) if f.is_dir() else f"{f}, which does not exist" for f in search_folders(data_dir))
    return f"{entry.name} is not here (looked in {looked}): run `normec data get {entry.name}`, or {by_hand(entry)}"


def by_hand(entry: Entry, folder: Path | None = None) -> str:
    """Instructions for a manual download: which files to put where."""
    target = (folder or cache_folder()) / entry.name
    urls = [url for origin in entry.origins if isinstance(origin, Download) for url in origin.urls]
    again = f", then run `normec data get {entry.name}`" if entry.family == "cifar10" else ""
    return f"download {', '.join(urls)} and put {'it' if len(urls) == 1 else 'them'} into {target}{again}"


@dataclass(frozen=True)
class Listing:
    """A known data set, and whether its files are here.

    Args:
        name: Its name.
        size: The numbers of records and of inputs.
        classes: The number of classes.
        origin: Who published it.
        licence: Its licence.
        page: Its web page.
        how: How it is obtained.
        present: Whether it can be loaded now.
        folder: The folder of its files; None for sets inside a package and for absent ones.

    Example:
        >>> listing()[0].name
        'digits'
    """

    name: str
    size: str
    classes: int
    origin: str
    licence: str
    page: str
    how: str
    present: bool
    folder: Path | None


def listing(data_dir: str | Path | None = None) -> list[Listing]:
    """List all known data sets, and whether they are here now.

    Args:
        data_dir: The folder to look in (default: the environment variable NORMEC_DATA), before the cache.

    Returns:
        One entry for each data set.

    Raises:
        UsageError: A folder may not be read.

    Example:
        >>> "digits" in [row.name for row in listing()]
        True
    """
    return [_row(entry, data_dir) for entry in ENTRIES.values()]


def _row(entry: Entry, data_dir: str | Path | None) -> Listing:
    files = locate(entry, data_dir)
    if entry.family == "embedded":
        present, how = find_spec("sklearn") is not None, "inside scikit-learn"
    elif entry.family == "heart-disease":
        present, how = True, "inside normec"
    else:
        present, how = files is not None, "; ".join(origin.label for origin in entry.origins)
    return Listing(
        name=entry.name,
        size=_size(entry),
        classes=entry.classes,
        origin=entry.origin,
        licence=entry.licence,
        page=entry.page,
        how=how,
        present=present,
        folder=next(iter(files.values())).parent if files else None,
    )


def _size(entry: Entry) -> str:
    """'32,561 + 16,281 × 123': training rows, test rows where published, features or image shape."""
    test = f" + {entry.test_rows:,}" if entry.test_rows else ""
    return f"{entry.rows:,}{test} × {'×'.join(map(str, entry.shape))}"


def _candidates(entry: Entry, folder: Path) -> list[Path]:
    """The folders below `folder` in which the files may be."""
    names = [sub.format(name=entry.name) for sub in _SUBFOLDERS[entry.family]]
    if entry.name in _TORCHVISION:
        names.append(_TORCHVISION[entry.name])
    if folder.name == entry.name:
        names.append("")
    return [folder / name for name in names]


def _file(entry: Entry, folder: Path, file: str) -> Path | None:
    for suffix in _SUFFIXES[entry.family]:
        path = folder / f"{file}{suffix}"
        try:
            if path.is_file():
                return path
        except PermissionError:
            raise UsageError(
                f"{folder} may not be read by you; change its permissions or give another folder"
            ) from None
    return None
