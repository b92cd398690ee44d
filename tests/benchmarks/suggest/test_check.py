"""The check of suggested settings: what counts as a miss, the records, the page, and a small check that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.privacy.tuning import TuningBudget
from benchmarks.suggest import check
from benchmarks.suggest.commands import PAGE, RECORDS
from benchmarks.suggest.conditions import BUDGET, CONDITIONS, PATIENTS, Condition
from benchmarks.suggest.page import page, table
from normec.experiments.suggestions import suggested
from normec.settings import make

TUTORIAL = PAGE.parents[1] / "tutorials" / "table.md"
EMBEDDED = ("digits", "breast_cancer", "wine", "heart-disease", str(PATIENTS / "patients.csv"))
SMALL = TuningBudget(4, (0,), BUDGET.test_seeds, rounds=(100,))


def record(tuned: float, found: float, usual: float, spread: float = 0.1) -> dict[str, Any]:
    values = {name: [mean - spread, mean, mean + spread] for name, mean in (("tuned", tuned), ("usual", usual))}
    shown = {"condition": "a", "search": "b", "noise": 0.1, "fitted": False, "trials": 3}
    return {**values, "suggested": [found - spread, found, found + spread], **shown}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((90.0, 88.1, 80.0), []),
        ((90.0, 87.9, 80.0), ["tuned"]),
        ((90.0, 89.0, 89.9), ["usual"]),
        ((90.0, 89.6, 90.0), []),  # less than half a point
        ((90.0, 85.0, 89.0), ["tuned", "usual"]),
        ((90.0, 89.0, 89.9, 5.0), []),  # chance
    ],
)
def test_what_counts_as_a_miss(values: tuple[float, ...], expected: list[str]) -> None:
    one = record(*values)
    assert check.misses(one) == expected
    assert table([one]).count("**") == 2 * len(expected)


def test_every_condition_has_a_record_and_the_page_shows_them() -> None:
    records = check.read(RECORDS)
    assert [check.key_of(one) for one in records] == list(CONDITIONS)
    for one, condition in zip(records, CONDITIONS.values(), strict=True):
        assert one["fitted"] == condition.fitted
        assert one["tuned_settings"] in condition.budget.settings(condition.contender)
    assert page(records) == PAGE.read_text(encoding="utf-8")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("key", [key for key, one in CONDITIONS.items() if one.shared["data"] in EMBEDDED])
def test_the_records_are_those_of_the_rule(key: str) -> None:
    condition = CONDITIONS[key]
    found = suggested(make({**condition.shared, "method": condition.contender.method}))
    held = next(one for one in check.read(RECORDS) if check.key_of(one) == key)
    assert held["suggested_settings"] == found.values


def test_the_table_of_patients_is_that_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(TUTORIAL.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], {})
    for name in ("patients.csv", "patients.toml"):
        assert (tmp_path / name).read_text() == (PATIENTS / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_a_suggestion_is_close_to_a_small_search(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = Condition("small", {"data": data, "clients": 50, "epsilon": 4.0}, budget=SMALL)
    monkeypatch.setitem(CONDITIONS, condition.key, condition)  # type: ignore[misc]  # a plain dict
    lines: list[str] = []
    check.run([condition.key], tmp_path / "records.jsonl", lines.append)
    (found,) = check.read(tmp_path / "records.jsonl")
    assert len(found["suggested"]) == len(found["usual"]) == len(found["tuned"]) == 5
    assert check.misses(found) == []
    assert lines[0].startswith("small/NormEC, forgetting: ")
    older = {**found, "suggested": [0.0, 0.0, 0.0], "suggested_settings": {}, "tuned": [1.0, 2.0, 3.0]}
    (tmp_path / "records.jsonl").write_text(json.dumps(older) + "\n")
    check.run([condition.key], tmp_path / "records.jsonl", lines.append, again=True)
    (again,) = check.read(tmp_path / "records.jsonl")
    assert again == {**found, "tuned": [1.0, 2.0, 3.0]}  # the tuned settings were not trained again
