"""The small data sets inside scikit-learn, which need no download: for first runs and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .partition import stratified

Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def read_embedded(name: str) -> tuple[Part, Part]:
    """Return the training part and the test part, scaled.

    The pixels of digits, 0 … 16, are brought to about mean 0 and spread 1 by two fixed numbers, which suit any such
    images. They are no statistics of these records, so a private run may use them. The other data sets are standardised
    by the mean and the standard deviation of the training part, so that nothing of the test part enters training; no
    noise covers these numbers.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise UsageError(f"{name} needs scikit-learn: pip install 'normec[data]'") from None
    bunch: Any = getattr(datasets, f"load_{name}")()
    values, targets = np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target, dtype=np.int64)
    train, test = stratified(targets)
    if name == "digits":
        scaled = (values / 16 - 0.3) / 0.4
    else:
        std = values[train].std(axis=0)
        scaled = (values - values[train].mean(axis=0)) / np.where(std > 0, std, 1)
    inputs = scaled.astype(np.float32)
    return (inputs[train], targets[train]), (inputs[test], targets[test])
