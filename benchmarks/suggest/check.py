"""Measure a condition: suggested, usual and tuned settings, tested with the same seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.privacy.trial import Trial, measure
from benchmarks.privacy.tuning import tune_and_test
from normec.experiments.suggestions import suggested
from normec.settings import make
from normec.system.files import write_atomic

from .conditions import CONDITIONS, Condition

Record = dict[str, Any]
MARGIN = 2.0  # points below a tuned run that are accepted


def check(condition: Condition) -> Record:
    """Tune the method of a condition, and test the tuned, the suggested and the usual settings.

    Returns:
        A record with the test values of each, in percent, and the suggested and tuned settings.
    """
    shared = {**condition.shared, "method": condition.contender.method}
    budget = condition.budget
    found = suggested(make({**shared, "seed": 0}))
    tuned = tune_and_test(condition.contender, shared, budget)
    return {
        "condition": condition.name,
        "search": condition.search,
        "fitted": condition.fitted,
        "by": budget.by,
        "noise": found.noise,
        "trials": budget.trials,
        "suggested_settings": found.values,
        "tuned_settings": tuned["chosen"],
        "tuned": _percent(tuned["accuracies"]),
        "suggested": test({**shared, **found.values}, condition),
        "usual": test(shared, condition),
    }


def check_again(condition: Condition, record: Record) -> Record:
    """Test what is suggested now, and keep the tuned and the usual settings of a record with their values."""
    shared = {**condition.shared, "method": condition.contender.method}
    found = suggested(make({**shared, "seed": 0}))
    return {
        **record,
        "fitted": condition.fitted,
        "noise": found.noise,
        "suggested_settings": found.values,
        "suggested": test({**shared, **found.values}, condition),
    }


def test(settings: Mapping[str, Any], condition: Condition) -> list[float]:
    """The test values of some settings with the seeds of the condition, in percent."""
    budget = condition.budget
    trials = [Trial(settings, seed, 0.0, budget.by) for seed in budget.test_seeds]
    return _percent([measure([one])[0]["value"] for one in trials])


def _percent(values: list[float]) -> list[float]:
    return [round(100 * value, 2) for value in values]


def lead(record: Record, over: str) -> float:
    """By how many points the suggested settings are ahead of the "tuned" or the "usual" ones."""
    return statistics.fmean(record["suggested"]) - statistics.fmean(record[over])


def spread(record: Record, over: str) -> float:
    """The standard error of `lead`."""
    values = (record["suggested"], record[over])
    return math.hypot(*(statistics.stdev(one) / math.sqrt(len(one)) for one in values))


def misses(record: Record) -> list[str]:
    """What the suggestion of a record falls short of: "tuned" by more than the margin, or "usual" beyond chance."""
    short = ["tuned"] if lead(record, "tuned") < -MARGIN else []
    worse = lead(record, "usual") < -2 * spread(record, "usual") and lead(record, "usual") < -0.5
    return short + (["usual"] if worse else [])


def read(path: Path) -> list[Record]:
    """The records of a file, in the order of the conditions."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    held = {key_of(one): one for one in map(json.loads, lines)}
    return [held[key] for key in CONDITIONS if key in held]


def key_of(record: Record) -> str:
    return f"{record['condition']}/{record['search']}"


def run(keys: list[str], path: Path, log: Callable[[str], None], again: bool = False) -> None:
    """Check some conditions and write their records, each as soon as it is known.

    With `again`, only the suggested settings of a condition that has a record are trained.
    """
    for key in keys:
        known = {key_of(one): one for one in read(path)}
        record = check_again(CONDITIONS[key], known[key]) if again and key in known else check(CONDITIONS[key])
        held = known | {key: record}
        lines = [json.dumps(held[key], ensure_ascii=False) for key in CONDITIONS if key in held]
        write_atomic(path, "".join(f"{line}\n" for line in lines))
        means = {name: round(statistics.mean(record[name]), 1) for name in ("tuned", "suggested", "usual")}
        log(f"{key}: {means}")
