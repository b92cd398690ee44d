"""The methods that are compared under one guarantee, and the ranges that their settings are drawn from."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Range = tuple[float, float]


@dataclass(frozen=True)
class Contender:
    """A method and the ranges of its settings: (low, high) is log-uniform, a list is a choice, else a constant."""

    method: str
    ranges: dict[str, Any]

    @property
    def normalises(self) -> bool:
        """Whether its steps have the length of the step size, whatever the gradient's."""
        return self.method == "dpsgd-norm" or (self.method == "normec" and self.ranges.get("server_norm", True))

    @property
    def remembers(self) -> bool:
        """Whether it has error feedback."""
        return not self.method.startswith("dpsgd")


ROUNDS = (50, 100, 200)
STEPS: Range = (0.02, 1.0)  # of methods that normalise
PLAIN_STEPS: Range = (0.2, 10.0)
MEMORY: Range = (0.01, 0.3)  # how far a memory moves a round: β, or the threshold of Clip21
CONTENDERS: Mapping[str, Contender] = {
    "NormEC": Contender("normec", {"beta": MEMORY, "decay": 0.0, "lr": STEPS}),
    "NormEC, no SN": Contender("normec", {"beta": MEMORY, "decay": 0.0, "server_norm": False, "lr": PLAIN_STEPS}),
    "NormEC, forgetting": Contender("normec", {"beta": MEMORY, "decay": [0.05, 0.1, 0.2, 0.4], "lr": STEPS}),
    "DP-Clip21": Contender("clip21", {"tau": MEMORY, "lr": PLAIN_STEPS}),
    "DP-SGD, norm": Contender("dpsgd-norm", {"lr": STEPS}),
    "DP-SGD, clip": Contender("dpsgd-clip", {"tau": (0.05, 1.0), "lr": PLAIN_STEPS}),
}


def contender(name: str, steps: Range = STEPS, plain: Range = PLAIN_STEPS, memory: Range = MEMORY) -> Contender:
    """A contender with its ranges: of step sizes, `steps` where it normalises and else `plain`; and of its memory."""
    one = CONTENDERS[name]
    ranges = {**one.ranges, "lr": steps if one.normalises else plain}
    if one.remembers:
        ranges["tau" if "tau" in ranges else "beta"] = memory
    return replace(one, ranges=ranges)


def draw(contender: Contender, number: int, rounds: Sequence[int] = ROUNDS, seed: int = 0) -> dict[str, Any]:
    """Setting `number` of a contender: the same for every ε and split."""
    chance = random.Random(f"{seed}/{contender.method}/{sorted(contender.ranges)}/{number}")
    found: dict[str, Any] = {"method": contender.method, "rounds": chance.choice(rounds)}
    for name, values in contender.ranges.items():
        if isinstance(values, tuple):
            low, high = map(math.log, values)
            found[name] = float(f"{math.exp(chance.uniform(low, high)):.3g}")
        else:
            found[name] = chance.choice(values) if isinstance(values, list) else values
    return found
