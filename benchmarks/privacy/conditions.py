"""The records by condition, how much noise a condition has, and conditions of one kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .contenders import ALL, Family
from .records import Record, cell_of
from .statistics import Comparison
from .studies import STUDIES, Condition, Study

LITTLE = 0.1  # a condition has little noise if √d / (μ n) is below this
Held = Mapping[str, Sequence[Record]]  # the records of each study
Conditions = Mapping[Condition, Mapping[str, Record]]  # the records of each contender, by condition


def by_condition(held: Held) -> dict[Condition, dict[str, Record]]:
    """The records by condition and contender, for conditions at client level with at least two contenders.

    A contender that has not run in a condition is missing there.
    """
    found: dict[Condition, dict[str, Record]] = {}
    for name, records in held.items():
        if STUDIES[name].settings.get("unit", "client") == "client":
            for one in records:
                found.setdefault(cell_of(one).condition, {})[one["method"]] = one
    return {condition: own for condition, own in found.items() if len(own) > 1}


def leading_family(condition: Condition, comparison: Comparison) -> Family | None:
    """The family of the best contender, if all contenders of the study have run and no other family is close."""
    if not set(STUDIES[condition.study].contenders) <= set(comparison.means):
        return None
    families = {ALL[name].family for name in comparison.tied()}
    return families.pop() if len(families) == 1 else None


def noise(records: Mapping[str, Record]) -> float:
    """√d / (μ n): the noise in the mean direction of a run, relative to its largest signal.

    It is 0 without privacy, and NaN if it is not known. A round of DP-SGD with normalisation has noise of norm σ√(d/n)
    in its mean message, and T rounds have √T times as much in their sum, which is T long at most.
    """
    for one in records.values():
        if one["epsilon"] is None:
            return 0.0
        if one["chosen"]["method"] == "dpsgd-norm":
            rounds = one["chosen"]["rounds"]
            if "parameters" in one:
                return float(one["sigma"] * math.sqrt(one["parameters"] / one["clients"] / rounds))
            if "noise" in one:
                return float(one["noise"] / math.sqrt(rounds))
    return math.nan


def private(conditions: Conditions) -> Conditions:
    """The conditions with noise."""
    return {one: own for one, own in conditions.items() if one.private}


def without_noise(conditions: Conditions) -> Conditions:
    """The conditions without noise."""
    return {one: own for one, own in conditions.items() if not one.private}


def linear(study: Study) -> bool:
    """Whether a study trains a linear model on the inputs of its data set."""
    return study.settings.get("model") in ("logistic", "softmax") and "features" not in study.settings


def on_networks(conditions: Conditions) -> Conditions:
    """The conditions with a network and 1,000 clients, in which most of the contenders are compared."""
    return {one: own for one, own in conditions.items() if one.study in ("fashion-mnist-1000", "cifar10-1000")}


def on_linear_models(conditions: Conditions) -> Conditions:
    """The conditions with a linear model on the inputs of a data set."""
    return {one: own for one, own in conditions.items() if linear(STUDIES[one.study])}
