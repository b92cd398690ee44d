"""Medians and ratios of outcomes that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speed.implementations import Implementation
from benchmarks.speed.measurement import Limits, Measured
from benchmarks.speed.picture import draw
from benchmarks.speed.results import case_summary, conditions, scaling, summary
from benchmarks.speed.workloads import Case


def ran(*times: float) -> dict[str, Any]:
    return {
        "status": "measured",
        "times": list(times),
        "start_up": 2.0,
        "peak_bytes": 100,
        "device_bytes": None,
        "waited": 0.0,
        "versions": {"torch": "x"},
    }


def measured(n: int, factor: float = 1.0) -> Measured:
    outcomes = {
        Implementation("floor", "eager"): [ran(4 * factor), ran(6 * factor)],
        Implementation("floor", "compiled"): [ran(3 * factor, 2 * factor, 100 * factor), ran(5 * factor)],
        Implementation("passes"): [ran(1 * factor)],
        Implementation("engine", "loop"): [ran(10 * factor)],
        Implementation("engine", "linear"): [{"status": "does not apply", "reason": "not linear"}],
        Implementation("hand-written"): [ran(20 * factor)],
        Implementation("peer", "pfl"): [{**ran(40 * factor), "status": "stopped", "reason": "stopped after 1 s"}],
        Implementation("record"): [ran(100 * factor)],
        Implementation("peer", "opacus"): [ran(300 * factor)],
    }
    return Measured(Case("mlp", n), outcomes)


def test_medians_and_ratios() -> None:
    found = case_summary(measured(5))
    rows = {row["name"]: row for row in found["rows"]}
    assert found["floor"] == 4  # compiled: the median of 3 and 5; eager has 5
    assert rows["floor, compiled"]["spread"] == [3, 5]
    assert rows["floor, compiled"]["rounds"] == 4
    assert found["passes"] == 1
    assert rows["normec, loop"]["over_floor"] == 10 / 4
    assert rows["normec, loop"]["over_floor_and_passes"] == 10 / 5
    assert rows["hand-written loop"]["over_ours"] == 2
    assert rows["opacus, per record"]["over_ours"] == 3  # against our per-record run, not against our best


def test_an_implementation_that_was_stopped_keeps_its_times_and_one_that_did_not_run_has_a_reason() -> None:
    rows = {row["name"]: row for row in case_summary(measured(5))["rows"]}
    assert rows["pfl"]["seconds"] == 40
    assert rows["pfl"]["reason"] == "stopped after 1 s"
    assert rows["normec, linear"]["seconds"] is None
    assert rows["normec, linear"]["status"] == "does not apply"


def test_a_case_without_a_floor_has_no_ratios() -> None:
    found = case_summary(Measured(Case("mlp", 5), {Implementation("engine", "loop"): [ran(1.0)]}))
    assert found["rows"][0]["over_floor"] is None
    assert found["rows"][0]["over_ours"] == 1


@pytest.mark.slow
def test_cost_against_n(tmp_path: Any) -> None:
    some = [measured(1000, 10.0), measured(100)]
    found = summary(some, Limits(), conditions(some, threads=2))
    series = scaling(found["cases"])
    assert series["floor, best"] == [(100, 4), (1000, 40)]
    assert series["normec, loop"] == [(100, 10), (1000, 100)]
    assert "normec, linear" not in series
    pytest.importorskip("matplotlib")
    draw(found["cases"], tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
