"""A cell of a study: one method at one ε and split, tuned on validation data, then tested with other seeds.

Every method gets the same number of settings, spread evenly over its own ranges; the best by validation data is trained
anew on all training records with seeds that tuning never saw, and its test value is reported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .contenders import MEMORY, PLAIN_STEPS, ROUNDS, STEPS, THRESHOLD, Contender, Range, Setting, contender, settings
from .trial import ANATOMY, Found, Trial, measure

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
    threshold: Range = THRESHOLD
    by: str = "accuracy"  # or "area"

    def contender(self, name: str) -> Contender:
        return contender(name, self.steps, self.plain_steps, self.memory, self.threshold)

    @cache  # noqa: B019 (efforts are few)
    def settings(self, name: str) -> list[Setting]:
        """All that a method gets."""
        return settings(self.contender(name), self.trials, self.rounds)


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
    together: int = 1,
) -> dict[str, Any]:
    """The record of a cell; `known` are runs measured before, each new one goes to `keep`.

    `where` are the settings that all methods share: data, clients, split, ε. On a GPU `together` runs take turns.
    """
    known = known if known is not None else {}

    def measured(trials: Mapping[str, Trial]) -> list[Found]:
        """By their keys; those of equal length together."""
        left = sorted((key for key in trials if key not in known), key=lambda key: trials[key].settings["rounds"])
        for begin in range(0, len(left), together):
            if time_is_up():
                raise Stopped
            keys = left[begin : begin + together]
            for key, found in zip(keys, measure([trials[key] for key in keys]), strict=True):
                known[key] = found
                keep(key, found)
        return [known[key] for key in trials]

    drawn, seeds = effort.settings(name), effort.tuning_seeds
    found = measured(
        {
            _key(trial): trial
            for trial in (Trial({**where, **one}, seed, VALIDATION, effort.by) for one in drawn for seed in seeds)
        }
    )
    by_setting = [found[begin : begin + len(seeds)] for begin in range(0, len(found), len(seeds))]
    values = [statistics.fmean(one["value"] for one in own) for own in by_setting]
    best = max(range(effort.trials), key=lambda number: (values[number], number))
    chosen = drawn[best]
    tested = measured(
        {
            _key(trial): trial
            for trial in (Trial({**where, **chosen}, seed, 0.0, effort.by, why=True) for seed in effort.test_seeds)
        }
    )
    return {"trials": effort.trials, "chosen": chosen, **_summary(values, best, tested)}


def _key(trial: Trial) -> str:
    """All that a run's result depends on; not where it ran."""
    settings = {name: value for name, value in trial.settings.items() if name != "device"}
    return f"{trial.by} {trial.validation:g} {trial.seed} {json.dumps(settings, sort_keys=True)}"


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
    for column in ("loss", "exact_epsilon", "sigma", *ANATOMY):
        held = [one[column] for one in ended if column in one]
        if held:
            found[column] = statistics.mean(held)
    return found
