"""A cell of a study: one method at one ε and split, tuned on validation data, then tested with other seeds.

Every method gets the same number of settings, drawn at random from its own ranges; the best by validation data is
trained anew on all training records with seeds that tuning never saw, and its test value is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contenders import MEMORY, PLAIN_STEPS, ROUNDS, STEPS, Contender, Range, contender, draw
from .trial import Found, measure

VALIDATION = 0.2


@dataclass(frozen=True)
class Effort:
    """How hard each method is tried, the same for all."""

    trials: int
    tuning_seeds: tuple[int, ...] = (0, 1)
    test_seeds: tuple[int, ...] = (2, 3, 4)
    rounds: tuple[int, ...] = ROUNDS
    steps: Range = STEPS
    plain_steps: Range = PLAIN_STEPS
    memory: Range = MEMORY
    by: str = "accuracy"  # or "area"

    def contender(self, name: str) -> Contender:
        return contender(name, self.steps, self.plain_steps, self.memory)


class Stopped(Exception):  # noqa: N818
    """The time is up: what was measured is kept, the cell has no result yet."""


Known = dict[str, Found]
Keep = Callable[[str, Found], None]


def cell(
    name: str,
    where: Mapping[str, Any],
    effort: Effort,
    known: Known | None = None,
    keep: Keep = lambda _key, _found: None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The record of a cell; `known` are runs measured before, each new one goes to `keep`.

    `where` are the settings that all methods share: data, clients, split, ε.
    """
    known = known if known is not None else {}

    def run(settings: dict[str, Any], label: str, seed: int, validation: float, why: bool) -> Found:
        key = f"{label}/{seed}"
        if key not in known:
            if time_is_up():
                raise Stopped
            known[key] = measure({**where, **settings}, seed, validation, effort.by, why)
            keep(key, known[key])
        return known[key]

    def tried(number: int) -> float:
        settings = draw(tuned, number, effort.rounds)
        found = [run(settings, f"trial-{number}", seed, VALIDATION, False) for seed in effort.tuning_seeds]
        return statistics.fmean(one["value"] for one in found)

    tuned = effort.contender(name)
    values = [tried(number) for number in range(effort.trials)]
    best = max(range(effort.trials), key=lambda number: (values[number], number))
    chosen = draw(tuned, best, effort.rounds)
    tested = [run(chosen, f"test-{best}", seed, 0.0, True) for seed in effort.test_seeds]
    return {"trials": effort.trials, "chosen": chosen, **_summary(values, best, tested)}


def _summary(values: Sequence[float], best: int, tested: Sequence[Found]) -> dict[str, Any]:
    accuracies = [one["value"] for one in tested]
    ended = [one for one in tested if "diverged" not in one]
    found: dict[str, Any] = {
        "validation": values[best],
        "tried": [round(value, 5) for value in values],
        "accuracies": accuracies,
        "accuracy": statistics.mean(accuracies),
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "diverged": len(tested) - len(ended),
    }
    for column in ("loss", "exact_epsilon", "sigma", "gradient", "estimate", "noise", "cosine", "memory_error"):
        held = [one[column] for one in ended if column in one]
        if held:
            found[column] = statistics.mean(held)
    return found
