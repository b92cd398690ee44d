"""Tune a contender for one ε and split on validation data, then test it with other seeds.

Every contender gets the same number of settings, spread evenly over its ranges. The setting that is best on
validation data is trained again on all training records with seeds that were not used for tuning, and its test value
is reported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contenders import ROLES, ROUNDS, Contender, Roles, Setting
from .design import settings
from .trial import DIAGNOSTICS, Measurement, Trial, measure

VALIDATION = 0.2
_drawn: dict[str, list[Setting]] = {}  # drawing takes a second, and records are checked against the same settings


@dataclass(frozen=True)
class TuningBudget:
    """The tuning budget, which is the same for all contenders.

    Attributes:
        trials: Settings that are tried.
        tuning_seeds: Seeds with which each of them is trained.
        test_seeds: Seeds with which the chosen one is tested; they are the same for all, so that results are paired.
        rounds: Choices of the number of rounds.
        roles: Bounds that differ from `ROLES`.
        by: What is measured: "accuracy", the "area" under the ROC curve, or a metric of the problem.
    """

    trials: int
    tuning_seeds: tuple[int, ...] = (0, 1)
    test_seeds: tuple[int, ...] = (2, 3, 4)
    rounds: tuple[int, ...] = ROUNDS
    roles: Roles = ()
    by: str = "accuracy"

    def bounds(self, contender: Contender) -> dict[str, Any]:
        """The bounds and choices from which the settings of a contender are drawn."""
        return contender.bounds({**ROLES, **dict(self.roles)})

    def settings(self, contender: Contender) -> list[Setting]:
        """The settings that are tried for a contender."""
        parts = contender.method, self.bounds(contender), dict(contender.fixed), self.trials, self.rounds
        key = json.dumps(parts)
        if key not in _drawn:
            _drawn[key] = settings(*parts)
        return _drawn[key]

    def run_rounds(self, contender: Contender) -> int:
        """The rounds of all runs of a contender, if the longest runs are chosen."""
        tuned = sum(int(one["rounds"]) for one in self.settings(contender)) * len(self.tuning_seeds)
        return tuned + max(self.rounds) * len(self.test_seeds)


class Stopped(Exception):  # noqa: N818
    """The time limit was reached; finished runs are kept, and the cell has no result yet."""


Known = dict[str, Measurement]
Keep = Callable[[str, Measurement], None]


def tune_and_test(
    contender: Contender,
    shared: Mapping[str, Any],
    budget: TuningBudget,
    known: Known | None = None,
    keep: Keep = lambda _key, _found: None,
    time_is_over: Callable[[], bool] = lambda: False,
    together: int = 1,
) -> dict[str, Any]:
    """Tune a contender and test the best setting.

    Args:
        contender: The contender.
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

    drawn, seeds = budget.settings(contender), budget.tuning_seeds
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
