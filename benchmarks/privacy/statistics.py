"""Comparisons of methods: paired seeds, Tukey's range test, and mean ranks with Nemenyi's critical difference.

In one condition every contender is tested with the same seeds, which decide the split of the data and the first model.
Seeds are blocks: the effect of a seed is removed, the residual variance is pooled over the contenders, and two of them
differ if their means are further apart than Tukey's honestly significant difference, which holds for all pairs
together. Over conditions, contenders are ranked in each of them, and mean ranks are compared after Nemenyi.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range, t

LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """The contenders of one condition.

    Attributes:
        means: Their mean test values.
        half_width: Half of the 95 % confidence interval of each mean, from the pooled residual variance.
        difference: The honestly significant difference of two means; infinite with one seed or contender.
    """

    means: Mapping[str, float]
    half_width: float
    difference: float

    @property
    def best(self) -> str:
        return max(self.means, key=lambda name: self.means[name])

    def tied(self) -> list[str]:
        """The contenders that are not significantly worse than the best, the best first."""
        top = self.means[self.best]
        held = [name for name, mean in self.means.items() if top - mean <= self.difference]
        return sorted(held, key=lambda name: -self.means[name])

    def apart(self, one: str, other: str) -> bool:
        """Whether two contenders differ significantly."""
        return abs(self.means[one] - self.means[other]) > self.difference


def compare(values: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare contenders by their test values, whose seeds are the same and in the same order."""
    table = np.array(list(values.values()), dtype=float)
    contenders, seeds = table.shape
    means = dict(zip(values, table.mean(1).tolist(), strict=True))
    freedom = max(contenders - 1, 1) * (seeds - 1)
    if not freedom:
        return Comparison(means, math.inf, math.inf)
    if contenders == 1:
        error = float(table.std(ddof=1)) / math.sqrt(seeds)
        return Comparison(means, float(t.ppf(1 - LEVEL / 2, freedom)) * error, math.inf)
    residuals = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    error = math.sqrt(float((residuals**2).sum()) / freedom / seeds)
    return Comparison(means, float(t.ppf(1 - LEVEL / 2, freedom)) * error, _range_width(contenders, freedom) * error)


@cache
def _range_width(contenders: int, freedom: float) -> float:
    """The width that the range of so many means exceeds by chance at the level 0.05, in standard errors."""
    return float(studentized_range.ppf(1 - LEVEL, contenders, freedom))


@dataclass(frozen=True)
class Ranking:
    """Mean ranks over conditions, 1 for the best, and the difference that is significant.

    Attributes:
        ranks: The mean rank of each contender, the best first.
        difference: Nemenyi's critical difference at the level 0.05.
        chance: Friedman's p-value: how likely such ranks are if all contenders are equal.
        conditions: The number of conditions.
    """

    ranks: Mapping[str, float]
    difference: float
    chance: float
    conditions: int


def rank(conditions: Sequence[Mapping[str, float]]) -> Ranking:
    """Rank contenders over conditions; each of them has a value for all contenders."""
    names = list(conditions[0])
    values = np.array([[condition[name] for name in names] for condition in conditions])
    found = rankdata(-values, axis=1).mean(0)
    count, many = len(names), len(conditions)
    width = _range_width(count, math.inf) / math.sqrt(2)
    difference = width * math.sqrt(count * (count + 1) / (6 * many))
    chance = float(friedmanchisquare(*values.T).pvalue) if many > 1 and count > 2 else 1.0
    ordered = sorted(zip(names, found.tolist(), strict=True), key=lambda one: one[1])
    return Ranking(dict(ordered), difference, chance, many)


def expected_best(values: Sequence[float], tries: int) -> float:
    """The expected maximum of `tries` of these values, drawn without replacement: the result of less tuning."""
    ordered, count = sorted(values), len(values)
    tries = min(tries, count)
    ways = math.comb(count, tries)
    return sum(value * math.comb(smaller, tries - 1) for smaller, value in enumerate(ordered)) / ways
