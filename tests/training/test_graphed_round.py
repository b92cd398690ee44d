"""A round closed at once is a round: the same bits, the same blame."""

from __future__ import annotations

import pytest

from .graphed_round_checks import CASES, check_blame, check_gradients_that_move, compare


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_closed_rounds_are_rounds(name: str) -> None:
    compare(name, "cpu")


def test_what_breaks_unseen_is_blamed() -> None:
    check_blame("cpu")


def test_gradients_may_move() -> None:
    check_gradients_that_move("cpu")
