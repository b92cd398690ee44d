"""The small data sets inside scikit-learn, which need no download: for first runs and for tests."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .partition import stratified

Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
_FILES = {"digits": "digits.csv.gz", "breast_cancer": "breast_cancer.csv", "wine": "wine_data.csv"}


def read_embedded(name: str) -> tuple[Part, Part]:
    """Return the training part and the test part, scaled.

    The pixels of digits, 0 … 16, are brought to about mean 0 and spread 1 by two fixed numbers, which suit any such
    images. They are no statistics of these records, so a private run may use them. The other data sets are standardised
    by the mean and the standard deviation of the training part, so that nothing of the test part enters training; no
    noise covers these numbers.
    """
    values, targets = _read_table(name)
    train, test = stratified(targets)
    if name == "digits":
        scaled = (values / 16 - 0.3) / 0.4
    else:
        std = values[train].std(axis=0)
        scaled = (values - values[train].mean(axis=0)) / np.where(std > 0, std, 1)
    inputs = scaled.astype(np.float32)
    return (inputs[train], targets[train]), (inputs[test], targets[test])


@lru_cache
def _read_table(name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the values and the targets of all records, from scikit-learn's file if it is where it has always been.

    Importing scikit-learn and what it imports of SciPy takes a second, half as long as importing torch. A file is read
    once in a process, because a tiny run takes little longer than this; the arrays must not be changed.
    """
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder, "datasets", "data", _FILES[name])
        if file.is_file():
            # The first line of a plain file holds the sizes and the names of the classes.
            table = np.loadtxt(file, delimiter=",", skiprows=0 if file.suffix == ".gz" else 1)
            return table[:, :-1], table[:, -1].astype(np.int64)
    try:
        from sklearn import datasets
    except ImportError:
        raise UsageError(f"{name} needs scikit-learn: pip install 'normec[data]'") from None
    bunch: Any = getattr(datasets, f"load_{name}")()
    return np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target, dtype=np.int64)
