"""The methods that are compared, and the search spaces from which their settings are drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Range = tuple[float, float]
Setting = dict[str, Any]


@dataclass(frozen=True)
class SearchSpace:
    """A method and its settings: a pair (low, high) is a log-uniform range, a list is a choice, else a constant."""

    method: str
    ranges: dict[str, Any]

    @property
    def normalises(self) -> bool:
        """Whether directions have norm one, or are means of vectors of norm one."""
        return self.method == "dpsgd-norm" or (self.method == "normec" and self.ranges.get("server_norm", True))

    @property
    def error_feedback(self) -> bool:
        """Whether the method has error feedback."""
        return not self.method.startswith("dpsgd")


ROUNDS = (50, 100, 200)
STEPS: Range = (0.02, 2.0)  # step sizes of methods that normalise
PLAIN_STEPS: Range = (0.1, 30.0)  # step sizes of the other methods
MEMORY: Range = (0.003, 0.3)  # the change of a memory per round: β, or the threshold of Clip21
THRESHOLD: Range = (0.05, 3.0)
_DRAWS = 500
SEARCH_SPACES: Mapping[str, SearchSpace] = {
    "NormEC": SearchSpace("normec", {"beta": MEMORY, "decay": 0.0, "lr": STEPS}),
    "NormEC, no SN": SearchSpace("normec", {"beta": MEMORY, "decay": 0.0, "server_norm": False, "lr": PLAIN_STEPS}),
    "NormEC, forgetting": SearchSpace("normec", {"beta": MEMORY, "decay": [0.05, 0.1, 0.2, 0.4], "lr": STEPS}),
    "DP-Clip21": SearchSpace("clip21", {"tau": MEMORY, "lr": PLAIN_STEPS}),
    "DP-SGD, norm": SearchSpace("dpsgd-norm", {"lr": STEPS}),
    "DP-SGD, clip": SearchSpace("dpsgd-clip", {"tau": THRESHOLD, "lr": PLAIN_STEPS}),
}


def search_space(
    name: str,
    steps: Range = STEPS,
    plain: Range = PLAIN_STEPS,
    memory: Range = MEMORY,
    threshold: Range = THRESHOLD,
) -> SearchSpace:
    """The search space of a method.

    Args:
        name: A name in `SEARCH_SPACES`.
        steps: Step sizes, if the method normalises.
        plain: Step sizes, if it does not.
        memory: β, or the threshold of Clip21.
        threshold: The threshold of DP-SGD with clipping.
    """
    one = SEARCH_SPACES[name]
    ranges = {**one.ranges, "lr": steps if one.normalises else plain}
    for own in {"beta", "tau"} & set(ranges):
        ranges[own] = memory if one.error_feedback else threshold
    return replace(one, ranges=ranges)


def settings(space: SearchSpace, count: int, rounds: Sequence[int] = ROUNDS, seed: int = 0) -> list[Setting]:
    """Settings that are spread evenly over a search space; they are the same for every ε and split.

    A range is divided into `count` parts of equal width on a log scale, and each part gives one value: a Latin
    hypercube. Choices are assigned along the step sizes: among as many neighbouring step sizes as there are choices,
    each choice occurs once, so that long runs occur with short and with long steps. The rest is random: of `_DRAWS`
    draws the one with the largest minimal distance between two settings is taken.
    """
    chance = random.Random(f"{seed}/{space.method}/{sorted(space.ranges)}")
    ranges = {name: values for name, values in space.ranges.items() if isinstance(values, tuple)}
    choices = {"rounds": list(rounds)} | {n: values for n, values in space.ranges.items() if isinstance(values, list)}
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
    fixed = {name: values for name, values in space.ranges.items() if name not in held}
    return [
        {"method": space.method, **fixed, **{name: held[name][at[number]] for name, at in best.items()}}
        for number in range(count)
    ]


def _nearest(columns: Sequence[Sequence[int]]) -> float:
    """The minimal distance of two points, which are given by the ranks of their values."""
    longest = [max(column) or 1 for column in columns]
    points = list(zip(*columns, strict=True))
    return min(
        (
            sum(((a - b) / most) ** 2 for a, b, most in zip(one, other, longest, strict=True))
            for one, other in itertools.combinations(points, 2)
        ),
        default=0.0,
    )


def range_ends(space: SearchSpace, chosen: Setting, count: int) -> dict[str, str]:
    """The settings whose values lie in the lowest or highest of the `count` parts of their ranges."""
    found: dict[str, str] = {}
    for name, values in space.ranges.items():
        if isinstance(values, tuple):
            low, high = map(math.log, values)
            position = (math.log(chosen[name]) - low) / (high - low) * count
            found |= {name: "lowest"} if position < 1 else {name: "highest"} if position > count - 1 else {}
    return found
