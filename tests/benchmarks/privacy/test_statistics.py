"""Comparisons of contenders against textbook procedures and simulations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import tukey_hsd

from benchmarks.privacy.statistics import compare, expected_best, rank


@pytest.mark.slow
def test_without_common_effects_the_difference_is_tukeys() -> None:
    """Blocks only take out the means of the seeds, which are noise of a smaller size where seeds have no effect."""
    table = np.random.default_rng(0).normal(size=(4, 300))
    found = compare({name: list(row) for name, row in zip("abcd", table, strict=True)})
    interval = tukey_hsd(*table).confidence_interval()
    assert found.difference == pytest.approx((interval.high[0, 1] - interval.low[0, 1]) / 2, rel=0.05)


def test_what_seeds_have_in_common_does_not_count() -> None:
    values = {"a": [0.1, 0.5, 0.9], "b": [0.11, 0.51, 0.91], "c": [0.101, 0.499, 0.9]}
    found = compare(values)
    assert found.best == "b"
    assert found.difference < 0.01
    assert found.tied() == ["b"]
    assert found.apart("a", "b")
    assert not found.apart("a", "c")
    shifted = compare(
        {name: [one + seed for one, seed in zip(row, (3, -1, 2), strict=True)] for name, row in values.items()}
    )
    assert shifted.difference == pytest.approx(found.difference, rel=1e-6)


def test_equal_contenders_are_rarely_apart() -> None:
    """The level holds for all pairs together."""
    chance = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        table = chance.normal(size=(6, 3)) + chance.normal(size=(1, 3))
        found = compare({str(name): list(row) for name, row in enumerate(table)})
        wrong += any(found.apart(one, other) for one, other in itertools.combinations(found.means, 2))
    assert 5 <= wrong <= 36  # 20 are expected


def test_one_seed_decides_nothing() -> None:
    found = compare({"a": [0.1], "b": [0.9]})
    assert math.isinf(found.difference)
    assert found.tied() == ["b", "a"]
    alone = compare({"a": [0.1, 0.2, 0.3]})
    assert alone.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert math.isinf(alone.difference)


def test_mean_ranks_and_the_critical_difference() -> None:
    """The example of Demšar (2006, JMLR 7): four classifiers on fourteen data sets, CD = 1.25 at the level 0.05."""
    conditions = [{"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}] * 7 + [{"a": 3.0, "b": 4.0, "c": 2.0, "d": 1.0}] * 7
    found = rank(conditions)
    assert found.difference == pytest.approx(1.25, abs=0.005)
    assert dict(found.ranks) == {"a": 1.5, "b": 1.5, "c": 3.0, "d": 4.0}
    assert found.chance < 1e-6
    assert rank([{"a": 1.0, "b": 1.0, "c": 0.0}] * 2).ranks["a"] == 1.5  # ties share their ranks


@pytest.mark.parametrize("tries", [1, 2, 3, 5])
def test_what_less_tuning_finds(tries: int) -> None:
    values = [0.3, 0.9, 0.1, 0.5, 0.5]
    every = [max(chosen) for chosen in itertools.combinations(values, tries)]
    assert expected_best(values, tries) == pytest.approx(sum(every) / len(every))
    assert expected_best(values, 99) == 0.9
