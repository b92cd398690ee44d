"""The fixed test part of sets published without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TEST_FRACTION = 0.2
SEED = 0

Indices = npt.NDArray[np.int64]


def stratified(targets: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Training and test records, both in the file's order: 20 % of every class, rounded, drawn with seed 0.

    Results are comparable only on the same records, so no library's version may move them: the order comes from
    PCG64's raw bits, the one stream NumPy promises never to change.
    """
    bits = np.random.PCG64(SEED)
    chosen = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        members = members[np.argsort(bits.random_raw(len(members)), kind="stable")]
        chosen[members[: round(TEST_FRACTION * len(members))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
