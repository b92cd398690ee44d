"""Read sparse text in LIBSVM's format as dense arrays, with scikit-learn and our own error messages."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

# Models are dense; a bag-of-words file with a million columns would not fit into memory.
LARGEST = 8 * 2**30


@dataclass(frozen=True)
class Table:
    """One file: float32 features, labels as written, and the qid column where the file has one."""

    path: Path
    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float64]
    groups: npt.NDArray[np.int64] | None


def read_libsvm(paths: list[Path], features: int | None = None) -> list[Table]:
    """Read the files of one data set together, so that all get the same columns and the same base of indices.

    The file a9a.t alone would have 122 columns, because the last column never occurs in it.
    """
    try:
        from sklearn.datasets import load_svmlight_files
    except ImportError:
        raise UsageError("reading LIBSVM files needs scikit-learn: pip install 'normec[data]'") from None
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} does not exist; give the path of a file in LIBSVM format")
    named = " and ".join(map(str, paths))
    try:
        columns = load_svmlight_files(
            [str(path) for path in paths], n_features=features, dtype=np.float32, query_id=True
        )
    except EOFError:
        raise UsageError(f"{named}: cut short, the compressed stream ends early; get it again") from None
    except (ValueError, IndexError, OSError, zlib.error, OverflowError) as reason:
        text = " ".join(str(reason).split())
        raise UsageError(f"{named}: not readable as LIBSVM text 'label index:value …' ({text})") from None
    return [_table(path, *columns[3 * i : 3 * i + 3]) for i, path in enumerate(paths)]


def _table(path: Path, sparse: Any, labels: npt.NDArray[np.float64], qid: npt.NDArray[np.int64]) -> Table:
    rows, width = sparse.shape
    if rows == 0:
        raise UsageError(f"{path} has no records; give a file with one record per line")
    size = rows * width * 4
    if size > LARGEST:
        raise UsageError(
            f"{path} is {rows} × {width}, {size / 2**30:.0f} GiB as dense float32, the limit is "
            f"{LARGEST / 2**30:.0f} GiB; take fewer records or hash the features"
        )
    table = Table(path, sparse.toarray(), labels, qid if len(qid) == rows else None)
    all_finite(table.features, path)
    all_finite(labels[:, None], path, "label")
    return table


def all_finite(values: npt.NDArray[Any], path: Path | str, what: str = "value") -> None:
    """Refuse NaN and infinity, and say where: one such value makes every model not finite in a round."""
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise UsageError(
            f"{path}: {what} {values[row, column]} in record {row + 1} (column {column + 1}); "
            "every number must be finite: repair or drop the record"
        )


def class_indices(tables: list[Table]) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Labels ±1, 0/1, 1/2, … → 0, 1, … in sorted order, by the labels of the first (training) file."""
    known = np.unique(tables[0].labels)
    if not np.array_equal(known, np.rint(known)):
        raise UsageError(
            f"{tables[0].path} has label {known[known != np.rint(known)][0]:g}; labels must be whole numbers"
        )
    for table in tables[1:]:
        strange = np.setdiff1d(table.labels, known)
        if len(strange):
            raise UsageError(f"{table.path} has label {strange[0]:g}, which {tables[0].path.name} has not")
    return [np.searchsorted(known, table.labels).astype(np.int64) for table in tables], len(known)
