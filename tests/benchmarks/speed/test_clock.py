"""The clock counts rounds; no test here depends on the time that anything takes."""

from __future__ import annotations

import pytest

from benchmarks.speed.clock import Clock, run_rounds


@pytest.mark.parametrize(("rounds", "warm_up"), [(1, 1), (3, 1), (20, 4), (200, 10)])
def test_rounds_after_a_warm_up(rounds: int, warm_up: int) -> None:
    clock, steps = Clock(rounds, 1e9), []
    run_rounds(lambda: steps.append(1), clock)
    assert len(steps) == clock.max_rounds == warm_up + rounds
    assert len(clock.times) == rounds
    assert all(time >= 0 for time in clock.times)


def test_time_ends_it_too() -> None:
    clock, steps = Clock(10**6, 1e-9), []
    run_rounds(lambda: steps.append(1), clock)
    assert len(steps) == 3  # two to warm up, the first of which has no limit, and one timed
    assert len(clock.times) == 1


def test_a_block_is_waited_for_once_and_counts_as_its_mean() -> None:
    waits: list[int] = []
    clock, steps = Clock(20, 1e9, wait=lambda: waits.append(len(steps)), block=5), []
    run_rounds(lambda: steps.append(1), clock)
    assert waits == [1, 2, 3, 4, 9, 14, 19, 24]
    assert len(clock.times) == 20
    assert clock.times[:5] == [clock.times[0]] * 5


def test_what_is_known_so_far_is_reported() -> None:
    reports: list[int] = []
    clock = Clock(3, 1e9, report=lambda: reports.append(len(clock.times)))
    run_rounds(lambda: None, clock)
    assert reports[0] == 1  # an implementation that is stopped after its first timed round has a result


def test_timing_begins_and_ends_when_it_is_said() -> None:
    steps: list[int] = []
    said: list[tuple[str, int]] = []
    begin, end = (lambda word=word: said.append((word, len(steps))) for word in ("begin", "end"))
    clock = Clock(20, 1e9, begin=begin, end=end)
    run_rounds(lambda: steps.append(1), clock)
    assert said == [("begin", 4), ("end", 24)]


def test_the_warm_up_has_a_limit_of_its_own() -> None:
    clock, steps = Clock(200, 1e-9, warm_up=1e9, block=5), []
    run_rounds(lambda: steps.append(1), clock)
    assert len(steps) == 10 + 1  # slow rounds are timed one by one
