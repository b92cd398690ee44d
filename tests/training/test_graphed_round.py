"""Rounds as they are recorded on a GPU, here without a recording: the same bits and the same errors."""

from __future__ import annotations

import pytest

from .graphed_round_checks import CASES, check_blame, check_gradients_that_move, compare


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", CASES)
def test_rounds_that_may_be_recorded_have_the_bits_of_rounds_step_by_step(name: str) -> None:
    compare(name, "cpu")


def test_what_breaks_between_two_rows_is_reported_with_its_round_and_client() -> None:
    check_blame("cpu")


def test_gradients_may_lie_elsewhere_in_every_round() -> None:
    check_gradients_that_move("cpu")
