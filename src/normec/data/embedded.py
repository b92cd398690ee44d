"""The small data sets inside scikit-learn, which need no download: for first runs and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .partition import stratified

Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def read_embedded(name: str) -> tuple[Part, Part]:
    """Training and test part, scaled.

    digits: pixels 0 … 16 brought to mean 0 and spread 1 by two fixed numbers, roughly those of any such images: no
    statistic of these records, so a private run may use it. The others: standardised by the mean and std of the
    training part only, so that nothing of the test part enters training; that is not private.
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
