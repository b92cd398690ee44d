"""The checks of a verification, their table, and the scale at which they are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Series = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Scale:
    """The size of a verification.

    Attributes:
        instances: The number of random quadratics.
        seeds: The seeds of runs with noise on random problems.
        real_seeds: The seeds of runs with noise on data sets.
        horizons: The numbers of rounds on random problems.
        real_horizons: The numbers of rounds on data sets.
        sets: The data sets.
        comparison_rounds: The rounds of the comparison with Clip21.
    """

    instances: int
    seeds: int
    real_seeds: int
    horizons: tuple[int, ...]
    real_horizons: tuple[int, ...]
    sets: tuple[str, ...]
    comparison_rounds: int


@dataclass(frozen=True)
class Check:
    """One row of the table. `tightness` is bound / measured, the median if there are many instances."""

    problem: str
    bound: str
    rounds: int
    measured: float
    value: float
    tightness: float
    holds: bool
    expected: bool = True


@dataclass
class Verification:
    """All checks, and the pictures of them."""

    checks: list[Check] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks if check.expected)

    def add(self, problem: str, bound: str, rounds: int, measured: Any, value: Any, *, expected: bool = True) -> None:
        left, right = np.atleast_1d(measured), np.atleast_1d(value)
        holds = bool((left <= right * (1 + 1e-6)).all())
        ratio = float(np.median(right / np.maximum(left, 1e-300)))
        self.checks.append(
            Check(problem, bound, rounds, float(np.median(left)), float(np.median(right)), ratio, holds, expected)
        )

    def facts(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "checks": [asdict(check) for check in self.checks],
            "slopes": self.slopes,
            "notes": self.notes,
            "pictures": [str(path) for path in self.pictures],
        }

    def table(self) -> str:
        """Return the table in Markdown."""
        lines = [
            "| problem | bound | K+1 | measured | bound | bound/measured | |",
            "| --- | --- | --: | --: | --: | --: | --- |",
        ]
        for c in self.checks:
            word = "holds" if c.holds else "BROKEN" if c.expected else "broken, as the errata say"
            numbers = f"{c.rounds} | {c.measured:.4g} | {c.value:.4g} | {c.tightness:.3g}"
            lines.append(f"| {c.problem} | {c.bound} | {numbers} | {word} |")
        lines += ["", *(f"Slope of {name} over K, log-log: {value:.3f}." for name, value in self.slopes.items())]
        return "\n".join([*lines, *self.notes]) + "\n"


def slope(xs: list[float], ys: list[float]) -> float:
    """Return the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])
