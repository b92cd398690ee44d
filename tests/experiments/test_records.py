"""Fewer records than a data set has: drawn by the seed, the same test records for all."""

from __future__ import annotations

import pytest

from normec.errors import UsageError
from normec.experiments import build
from normec.problems.client_data import ResidentRecords
from normec.settings import make


def used(records: object) -> list[list[int]]:
    assert isinstance(records, ResidentRecords)
    return [part.tolist() for part in records.rows]


def test_as_many_as_asked_for_are_dealt_out_and_held_out() -> None:
    problem = build.problem(make({"clients": 5, "records": 200, "validation": 0.1}))
    dealt = [row for part in used(problem.records) for row in part]
    held_out = used(problem.validation)[0]
    assert (len(dealt), len(held_out)) == (180, 20)
    assert len({*dealt, *held_out}) == 200
    assert max(dealt) > 1000  # drawn from all of them, not the first ones


def test_the_seed_draws_the_training_records_and_not_the_test_records() -> None:
    problems = [build.problem(make({"clients": 2, "records": 100, "test_records": 50, "seed": s})) for s in (1, 1, 2)]
    first, same, other = ({row for part in used(problem.records) for row in part} for problem in problems)
    assert first == same != other
    tests = [used(problem.test)[0] for problem in problems]
    assert tests[0] == tests[1] == tests[2]
    assert len(tests[0]) == 50


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"records": 2000}, "records must be at most the 1438 records there are, got 2000"),
        ({"test_records": 0}, "test_records must be a whole number >= 1"),
    ],
)
def test_what_is_not_there_is_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build.problem(make({"clients": 2, **settings}))
