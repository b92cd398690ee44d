"""Whether an account stays within a budget is found without a PLD wherever a cheaper bound says so."""

from __future__ import annotations

import random

import pytest

from normec.privacy import accounting, gaussian
from normec.privacy.accounting import Account, Event


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("number", range(6))
def test_it_says_what_epsilon_says(number: int) -> None:
    draw = random.Random(number)
    kinds = [
        Event(draw.uniform(0.5, 5.0), draw.choice((0.01, 0.2, 1.0)), draw.randint(1, 50))
        for _ in range(draw.randint(1, 3))
    ]
    account = Account(1e-5, kinds)
    epsilon = account.epsilon()
    for factor in (0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 1.02, 2.0):
        assert account.within(factor * epsilon) is (factor >= 1)


def test_an_empty_account_is_within_every_budget() -> None:
    assert Account(1e-5).within(0.1)


@pytest.mark.slow
def test_kinds_of_releases_that_a_server_invents_need_no_pld(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PLD takes most of a second for each kind of release, and every later message of the party would wait for it."""
    account = Account(1e-5, [Event(1 + kind / 1000, rate=1e-3) for kind in range(20)])
    assert gaussian.epsilon(account.mu_unamplified, account.delta) > 8, "the simplest bound is too large"
    monkeypatch.setattr(accounting, "epsilon_pld", lambda *_: pytest.fail("a PLD was computed"))
    assert account.within(8.0)
