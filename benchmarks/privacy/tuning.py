"""Tune a method for one ε and split on validation data, then test it with other seeds.

Every method gets the same number of settings, spread evenly over its search space. The setting that is best on
validation data is trained again on all training records with seeds that were not used for tuning, and its test value
is reported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .search_space import (
    MEMORY,
    PLAIN_STEPS,
    ROUNDS,
    STEPS,
    THRESHOLD,
    Range,
    SearchSpace,
    Setting,
    search_space,
    settings,
)
from .trial import DIAGNOSTICS, Measurement, Trial, measure

VALIDATION = 0.2


@dataclass(frozen=True)
class TuningBudget:
    """The tuning budget, which is the same for all methods."""

    trials: int
    tuning_seeds: tuple[int, ...] = (0, 1)
    test_seeds: tuple[int, ...] = (2, 3, 4)
    rounds: tuple[int, ...] = ROUNDS
    steps: Range = STEPS
    plain_steps: Range = PLAIN_STEPS
    memory: Range = MEMORY
    threshold: Range = THRESHOLD
    by: str = "accuracy"  # or "area"

    def search_space(self, name: str) -> SearchSpace:
        """The search space of a method."""
        return search_space(name, self.steps, self.plain_steps, self.memory, self.threshold)

    @cache  # noqa: B019 (there are few budgets)
    def settings(self, name: str) -> list[Setting]:
        """The settings that are tried for a method."""
        return settings(self.search_space(name), self.trials, self.rounds)


class Stopped(Exception):  # noqa: N818
    """The time limit was reached; finished runs are kept, and the cell has no result yet."""


Known = dict[str, Measurement]
Keep = Callable[[str, Measurement], None]


def tune_and_test(
    name: str,
    shared: Mapping[str, Any],
    budget: TuningBudget,
    known: Known | None = None,
    keep: Keep = lambda _key, _found: None,
    time_is_over: Callable[[], bool] = lambda: False,
    together: int = 1,
) -> dict[str, Any]:
    """Tune a method and test the best setting.

    Args:
        name: A name in `SEARCH_SPACES`.
        shared: The settings that all methods share: data, clients, split, ε.
        budget: The tuning budget.
        known: Runs that were measured before.
        keep: Called with the key and the result of every new run.
        time_is_over: Whether the time limit is reached.
        together: Runs that take turns on a GPU.

    Returns:
        The numbers of the cell's record.

    Raises:
        Stopped: The time limit was reached.
    """
    known = known if known is not None else {}

    def measured(trials: Mapping[str, Trial]) -> list[Measurement]:
        """Results by key; runs of equal length are measured together."""
        left = sorted((key for key in trials if key not in known), key=lambda key: trials[key].settings["rounds"])
        for begin in range(0, len(left), together):
            if time_is_over():
                raise Stopped
            keys = left[begin : begin + together]
            for key, found in zip(keys, measure([trials[key] for key in keys]), strict=True):
                known[key] = found
                keep(key, found)
        return [known[key] for key in trials]

    drawn, seeds = budget.settings(name), budget.tuning_seeds
    found = measured(
        {
            _key(trial): trial
            for trial in (Trial({**shared, **one}, seed, VALIDATION, budget.by) for one in drawn for seed in seeds)
        }
    )
    by_setting = [found[begin : begin + len(seeds)] for begin in range(0, len(found), len(seeds))]
    values = [statistics.fmean(one["value"] for one in own) for own in by_setting]
    best = max(range(budget.trials), key=lambda number: (values[number], number))
    chosen = drawn[best]
    tested = measured(
        {
            _key(trial): trial
            for trial in (
                Trial({**shared, **chosen}, seed, 0.0, budget.by, diagnose=True) for seed in budget.test_seeds
            )
        }
    )
    return {"trials": budget.trials, "chosen": chosen, **_summary(values, best, tested)}


def _key(trial: Trial) -> str:
    """Everything that the result of a run depends on, which excludes the device."""
    settings = {name: value for name, value in trial.settings.items() if name != "device"}
    return f"{trial.by} {trial.validation:g} {trial.seed} {json.dumps(settings, sort_keys=True)}"


def _summary(values: Sequence[float], best: int, tested: Sequence[Measurement]) -> dict[str, Any]:
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
    for column in ("loss", "exact_epsilon", "sigma", *DIAGNOSTICS):
        held = [one[column] for one in ended if column in one]
        if held:
            found[column] = statistics.mean(held)
    return found
