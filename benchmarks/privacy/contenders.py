"""The methods that are compared under one guarantee, and the ranges that their settings are drawn from."""

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
class Contender:
    """A method and the ranges of its settings: (low, high) is log-uniform, a list is a choice, else a constant."""

    method: str
    ranges: dict[str, Any]

    @property
    def normalises(self) -> bool:
        """Whether its directions have a length of one, or are a mean of such, whatever the gradient's."""
        return self.method == "dpsgd-norm" or (self.method == "normec" and self.ranges.get("server_norm", True))

    @property
    def remembers(self) -> bool:
        """Whether it has error feedback."""
        return not self.method.startswith("dpsgd")


ROUNDS = (50, 100, 200)
STEPS: Range = (0.02, 2.0)  # of methods that normalise
PLAIN_STEPS: Range = (0.1, 30.0)
MEMORY: Range = (0.003, 0.3)  # how far a memory moves a round: β, or the threshold of Clip21
THRESHOLD: Range = (0.05, 3.0)
_CHANCES = 500
CONTENDERS: Mapping[str, Contender] = {
    "NormEC": Contender("normec", {"beta": MEMORY, "decay": 0.0, "lr": STEPS}),
    "NormEC, no SN": Contender("normec", {"beta": MEMORY, "decay": 0.0, "server_norm": False, "lr": PLAIN_STEPS}),
    "NormEC, forgetting": Contender("normec", {"beta": MEMORY, "decay": [0.05, 0.1, 0.2, 0.4], "lr": STEPS}),
    "DP-Clip21": Contender("clip21", {"tau": MEMORY, "lr": PLAIN_STEPS}),
    "DP-SGD, norm": Contender("dpsgd-norm", {"lr": STEPS}),
    "DP-SGD, clip": Contender("dpsgd-clip", {"tau": THRESHOLD, "lr": PLAIN_STEPS}),
}


def contender(
    name: str,
    steps: Range = STEPS,
    plain: Range = PLAIN_STEPS,
    memory: Range = MEMORY,
    threshold: Range = THRESHOLD,
) -> Contender:
    """A contender with its ranges: of step sizes, `steps` where it normalises and else `plain`; and of β or τ."""
    one = CONTENDERS[name]
    ranges = {**one.ranges, "lr": steps if one.normalises else plain}
    for own in {"beta", "tau"} & set(ranges):
        ranges[own] = memory if one.remembers else threshold
    return replace(one, ranges=ranges)


def settings(contender: Contender, count: int, rounds: Sequence[int] = ROUNDS, seed: int = 0) -> list[Setting]:
    """So many settings, spread evenly: the same for every ε and split.

    A range is cut into `count` parts of equal width on a log scale, and each part gives one value: a Latin hypercube.
    Choices are dealt out along the step sizes: as many neighbours as there are choices have one each, so that long runs
    meet short and long steps. The rest is chance, `_CHANCES` times; the one is taken whose nearest two settings are
    farthest apart.
    """
    chance = random.Random(f"{seed}/{contender.method}/{sorted(contender.ranges)}")
    ranges = {name: values for name, values in contender.ranges.items() if isinstance(values, tuple)}
    choices = {"rounds": list(rounds)} | {
        n: values for n, values in contender.ranges.items() if isinstance(values, list)
    }
    held: dict[str, list[Any]] = {name: sorted(values) for name, values in choices.items()}
    for name, values in ranges.items():
        low, high = map(math.log, values)
        parts = [low + (high - low) * (part + chance.random()) / count for part in range(count)]
        held[name] = [float(f"{math.exp(one):.3g}") for one in parts]

    def orders() -> dict[str, list[int]]:
        """Which of its values each setting has, settings in the order of their step sizes."""
        found = {name: chance.sample(range(count), count) for name in ranges} | {"lr": list(range(count))}
        for name, values in choices.items():
            dealt = [chance.sample(range(len(values)), len(values)) for _ in range(-(-count // len(values)))]
            found[name] = list(itertools.chain(*dealt))[:count]
        return found

    best = max((orders() for _ in range(_CHANCES)), key=lambda order: _nearest(list(order.values())))
    fixed = {name: values for name, values in contender.ranges.items() if name not in held}
    return [
        {"method": contender.method, **fixed, **{name: held[name][at[number]] for name, at in best.items()}}
        for number in range(count)
    ]


def _nearest(columns: Sequence[Sequence[int]]) -> float:
    """The least distance of two points, given by the ranks of their values, each column as long as the others."""
    longest = [max(column) or 1 for column in columns]
    points = list(zip(*columns, strict=True))
    return min(
        (
            sum(((a - b) / most) ** 2 for a, b, most in zip(one, other, longest, strict=True))
            for one, other in itertools.combinations(points, 2)
        ),
        default=0.0,
    )


def outermost(contender: Contender, chosen: Setting, count: int) -> dict[str, str]:
    """Names of those values that lie in the first or last of the `count` parts of their ranges, and in which."""
    found: dict[str, str] = {}
    for name, values in contender.ranges.items():
        if isinstance(values, tuple):
            low, high = map(math.log, values)
            place = (math.log(chosen[name]) - low) / (high - low) * count
            found |= {name: "lowest"} if place < 1 else {name: "highest"} if place > count - 1 else {}
    return found
