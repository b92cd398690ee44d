"""Averages of the iterates x^k, which are evaluated and returned in the place of the last one.

With start s, for k ≥ s:

    polyak   a^k = (x^s + … + x^k) / (k − s + 1)
    ema      a^k = (x^k + d x^{k−1} + … + d^{k−s} x^s) / (1 + d + … + d^{k−s}),   d the decay

Both are a ← a + w (x − a) with the weight w of the newest iterate: 1/t, or (1 − d)/(1 − dᵗ), t = k − s + 1. Training
goes on from x, so an average changes nothing of it. It is a function of released values and costs no privacy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError, at_least, below_one, one_of

Kind = Literal["ema", "polyak"]
AVERAGES: tuple[Kind, ...] = get_args(Kind)
USUAL_DECAY = 0.99


@dataclass(frozen=True)
class Averaging:
    """An average of the iterates, for evaluation and for the model that is returned.

    Args:
        kind: "ema", an exponential moving average, or "polyak", the mean.
        decay: The factor of an iterate's weight in each later round; only for "ema" (default: 0.99).
        start: The first round whose iterate is part of the average (default: 0 for "ema", half of the rounds for
            "polyak"). Warm-up rounds, in which x does not move, are never part of it.

    Raises:
        UsageError: The kind is unknown, or a value is out of range or does not apply.

    Example:
        >>> Averaging("ema", decay=0.9).decay
        0.9
        >>> [round(Averaging("polyak", start=2).weight(k), 2) for k in range(5)]
        [0.0, 0.0, 1.0, 0.5, 0.33]
    """

    kind: Kind
    decay: float | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        one_of(AVERAGES, averaging=self.kind)
        if self.decay is not None and self.kind != "ema":
            raise UsageError(f"the decay of an average is for averaging='ema', got averaging={self.kind!r}")
        if self.decay is not None:
            below_one(averaging_decay=self.decay)
        if self.start is not None:
            at_least(0, averaging_start=self.start)

    def planned(self, rounds: int, warmup: int) -> Averaging:
        """The average with the values that are used in a run of so many rounds."""
        start = self.start if self.start is not None else rounds // 2 if self.kind == "polyak" else 0
        if start > rounds:
            raise UsageError(f"averaging_start must be at most the number of rounds, {rounds}, got {start}")
        decay = self.decay if self.decay is not None or self.kind == "polyak" else USUAL_DECAY
        return dataclasses.replace(self, decay=decay, start=max(start, warmup))

    def weight(self, k: int) -> float:
        """The weight of x^k in the average of the iterates up to it; 0 before the start."""
        t = k - (self.start or 0) + 1
        if t <= 0:
            return 0.0
        if self.kind == "polyak":
            return 1 / t
        decay = self.decay if self.decay is not None else USUAL_DECAY
        return (1 - decay) / (1 - decay**t)


def averaging_of(given: str | Averaging | None, rounds: int, warmup: int) -> Averaging | None:
    """The average that a run keeps, with the values that are used.

    Raises:
        UsageError: `given` is no average.
    """
    if given is None:
        return None
    declared = given if isinstance(given, Averaging) else Averaging(given)  # type: ignore[arg-type]
    return declared.planned(rounds, warmup)
