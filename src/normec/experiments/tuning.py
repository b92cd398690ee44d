"""Which of several settings is best: by a column of the results, as a mean over seeds, never on test data unawares."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import UsageError, one_of
from ..settings.config import RunConfig
from ..storage.history import NOT_COVERED, UNNOISED

Key = TypeVar("Key")

# What can decide, and whether more of it is better.
CRITERIA: Mapping[str, bool] = {
    "validation_accuracy": True,
    "validation_loss": False,
    "loss": False,
    "grad_norm": False,
    "smallest_grad_norm": False,
    "memory_error": False,
    "accuracy": True,
    "best_accuracy": True,
    "test_loss": False,
}
RESULTS = ("finished", "stopped")  # how a run ends that has a result; it is stopped where its privacy budget ends
TEST = ("accuracy", "best_accuracy", "test_loss")
DEFAULT = "validation_accuracy"


def check(by: str, on_test: bool) -> None:
    """Refuse a column that is none, and one of test data unless that was asked for in so many words."""
    one_of(CRITERIA, by=by)
    if by in TEST and not on_test:
        raise UsageError(
            f"by = {by!r} would choose settings on test data; take validation_accuracy or validation_loss "
            "(tune_on_test = true, or --on-test, is for replaying a paper that did so)"
        )


def value(summary: Mapping[str, Any], by: str) -> float | None:
    """A run's value of a criterion at its end; None where it was not measured, or the run has no result."""
    if summary.get("status") not in RESULTS:
        return None
    found = summary[by] if by in summary else summary["final"].get(by)
    return None if found is None else float(found)


def best(candidates: Mapping[Key, Sequence[float | None]], by: str) -> Key | None:
    """The candidate with the best mean over its seeds; None where none has a value.

    A missing value (None) is a seed that diverged, failed or has not run: a candidate that lost fewer seeds goes
    before one that lost more, whatever their means.
    """
    sign = -1.0 if CRITERIA[by] else 1.0
    ranks = {}
    for key, values in candidates.items():
        held = [value for value in values if value is not None]
        if held:
            ranks[key] = (len(values) - len(held), sign * statistics.fmean(held))
    return min(ranks, key=lambda key: ranks[key]) if ranks else None


def records(config: RunConfig, by: str) -> bool:
    """Whether a run may record a criterion: a private one records nothing without noise unless it is told to."""
    return not config.private or config.diagnostics or by.removeprefix("smallest_") not in UNNOISED


def uncovered(by: str) -> UsageError:
    """What to say where private runs are to be chosen by what they do not record."""
    return UsageError(
        f"private runs do not record {by}: it is measured without noise, and {NOT_COVERED}; choose by "
        "validation_accuracy (validation = 0.2), or set diagnostics = true (--diagnostics) to record it all the same"
    )


def unmeasured(by: str) -> UsageError:
    """What to say where finished runs have no value of a criterion."""
    cure = "set validation = 0.2" if by.startswith("validation") else "set full_gradient = true"
    return UsageError(f"{by} was not measured; {cure} to have it")
