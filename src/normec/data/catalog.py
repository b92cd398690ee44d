"""What `normec data list` shows: every known data set, where it can be had, whether it is here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .entries import ENTRIES, Entry
from .folders import locate


@dataclass(frozen=True)
class Listing:
    """One row. `folder` is where the files lie; sets inside scikit-learn have none."""

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
    """All known data sets; the state of `present` is of this moment."""
    return [_row(entry, data_dir) for entry in ENTRIES.values()]


def _row(entry: Entry, data_dir: str | Path | None) -> Listing:
    files = locate(entry, data_dir)
    if entry.family == "embedded":
        present, how = find_spec("sklearn") is not None, "inside scikit-learn"
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
