"""The choice among several settings by a column of the results, as a mean over seeds; test data need a request."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import UsageError, one_of
from ..report.result_metrics import METRICS, Metric, values_of
from ..settings.config import RunConfig
from ..storage.history import NOT_COVERED

Key = TypeVar("Key")

CRITERIA: Mapping[str, Metric] = {metric.column: metric for metric in METRICS if metric.decides}
TEST = tuple(name for name, metric in CRITERIA.items() if metric.on_test)
RESULTS = ("finished", "stopped")  # states of runs with a result; a rule or a spent budget stops a run
DEFAULT = "validation_accuracy"


def check(by: str, on_test: bool) -> None:
    """Refuse unknown columns, and columns of test data unless `on_test` is set."""
    one_of(CRITERIA, by=by)
    if by in TEST and not on_test:
        raise UsageError(
            f"by = {by!r} would choose settings on test data; take validation_accuracy or validation_loss "
            "(tune_on_test = true, or --on-test, is for reproducing a paper that did so)"
        )


def value(summary: Mapping[str, Any], by: str) -> float | None:
    """Return the final value of a criterion; None if it was not measured, or the run has no result."""
    if summary.get("status") not in RESULTS:
        return None
    found = values_of(summary)[by]
    return None if found is None else float(found)


def best(candidates: Mapping[Key, Sequence[float | None]], by: str) -> Key | None:
    """Return the candidate with the best mean over its seeds; None if none has a value.

    A missing value (None) is a seed that diverged, failed or has not run. A candidate with fewer missing seeds is
    preferred to one with more, whatever their means.
    """
    sign = -1.0 if CRITERIA[by].better == "max" else 1.0
    ranks = {}
    for key, values in candidates.items():
        held = [value for value in values if value is not None]
        if held:
            ranks[key] = (len(values) - len(held), sign * statistics.fmean(held))
    return min(ranks, key=lambda key: ranks[key]) if ranks else None


def records(config: RunConfig, by: str) -> bool:
    """Whether a run records a criterion; a private run records values without noise only with diagnostics."""
    return not config.private or config.diagnostics or not CRITERIA[by].unnoised


def uncovered(by: str) -> UsageError:
    """Return the error for choosing private runs by a column that they do not record."""
    return UsageError(
        f"private runs do not record {by}: it is measured without noise, and {NOT_COVERED}; choose by results on "
        "validation data (--validation 0.2 --by validation_accuracy, or both settings in a file), or set "
        "diagnostics = true (--diagnostics) to record it anyway"
    )


def unmeasured(by: str) -> UsageError:
    """Return the error for finished runs without a value of a criterion."""
    cure = "set validation = 0.2" if by.startswith("validation") else "set full_gradient = true"
    return UsageError(f"{by} was not measured; {cure} to measure it")
