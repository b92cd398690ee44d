"""The settings that are tried: a seeded Latin hypercube over the ranges of a contender."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .contenders import Setting

_DRAWS = 500


def settings(
    method: str,
    bounds: Mapping[str, Any],
    fixed: Mapping[str, Any],
    count: int,
    rounds: Sequence[int],
    seed: int = 0,
) -> list[Setting]:
    """Settings that are spread evenly over their ranges; they are the same for every ε and split.

    A range is divided into `count` parts of equal width on a log scale, and each part gives one value: a Latin
    hypercube. Choices are assigned along the step sizes: among as many neighbouring step sizes as there are choices,
    each choice occurs once, so that long runs occur with short and with long steps. The rest is random: of `_DRAWS`
    draws the one with the largest minimal distance between two settings is taken.

    Args:
        method: The method's name.
        bounds: For each setting that is drawn, two bounds or a list of choices; "lr" is one of them.
        fixed: The other settings.
        count: How many settings.
        rounds: The choices of the number of rounds.
        seed: Seed of the draws.
    """
    chance = random.Random(f"{seed}/{method}/{sorted([*bounds, *fixed])}")
    ranges = {name: values for name, values in bounds.items() if isinstance(values, tuple)}
    choices = {"rounds": list(rounds)} | {n: values for n, values in bounds.items() if isinstance(values, list)}
    held: dict[str, list[Any]] = {name: sorted(values) for name, values in choices.items()}
    for name, values in ranges.items():
        low, high = map(math.log, values)
        parts = [low + (high - low) * (part + chance.random()) / count for part in range(count)]
        held[name] = [float(f"{math.exp(one):.3g}") for one in parts]

    def orders() -> dict[str, list[int]]:
        """The rank of each value, for settings in the order of their step sizes."""
        found = {name: chance.sample(range(count), count) for name in ranges} | {"lr": list(range(count))}
        for name, values in choices.items():
            groups = [chance.sample(range(len(values)), len(values)) for _ in range(-(-count // len(values)))]
            found[name] = list(itertools.chain(*groups))[:count]
        return found

    best = max((orders() for _ in range(_DRAWS)), key=lambda order: _nearest(list(order.values())))
    return [
        {"method": method, **fixed, **{name: held[name][at[number]] for name, at in best.items()}}
        for number in range(count)
    ]


def _nearest(columns: Sequence[Sequence[int]]) -> float:
    """The minimal distance of two points, squared; the points are given by the ranks of their values."""
    count = len(columns[0])
    apart = np.zeros((count, count))
    for column in columns:
        ranks = np.array(column)
        apart += ((ranks[:, None] - ranks) / (max(column) or 1)) ** 2
    np.fill_diagonal(apart, np.inf)
    return float(apart.min())


def range_ends(bounds: Mapping[str, Any], chosen: Setting, count: int) -> dict[str, str]:
    """The settings whose values lie in the lowest or highest of the `count` parts of their ranges."""
    found: dict[str, str] = {}
    for name, values in bounds.items():
        if isinstance(values, tuple):
            low, high = map(math.log, values)
            position = (math.log(chosen[name]) - low) / (high - low) * count
            found |= {name: "lowest"} if position < 1 else {name: "highest"} if position > count - 1 else {}
    return found
