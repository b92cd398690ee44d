"""The mean and spread of a column over runs that differ only in their seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..storage.history import History

Spread = Literal["deviation", "range", "none"]


@dataclass(frozen=True)
class Band:
    """A line and the band around it; `seeds` runs had a value in every round of `rounds`."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def over_seeds(histories: Sequence[History], column: str, spread: Spread = "range") -> Band:
    """A column's mean over the histories that have it, in the rounds that all of those measured.

    The band is one standard deviation either way ("deviation"), from the least to the greatest ("range"), or the mean
    itself ("none").
    """
    held = [dict(zip(one.rounds(column), one[column], strict=True)) for one in histories if one[column]]
    rounds = sorted(set.intersection(*(set(one) for one in held))) if held else []
    rows = [[one[k] for one in held] for k in rounds]
    mean = [statistics.fmean(row) for row in rows]
    if spread == "deviation":
        off = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in rows]
        low, high = ([m + sign * d for m, d in zip(mean, off, strict=True)] for sign in (-1, 1))
    elif spread == "range":
        low, high = [min(row) for row in rows], [max(row) for row in rows]
    else:
        low, high = mean, mean
    return Band(rounds, mean, low, high, len(held))
