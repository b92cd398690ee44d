"""ε at the ends of the number range: never below the truth, never an error that is not the user's."""

from __future__ import annotations

import math
from pathlib import Path

import mpmath
import pytest

from normec.privacy import BudgetSpent, Event, Facts, Ledger, Privacy, Setting, gaussian, release
from normec.privacy.accounting import Account, epsilon_of, sigma_for


def log_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """ln δ(ε) of μ-GDP from its definition, with 400 digits."""
    with mpmath.workdps(400):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)

        def sf(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return mpmath.log(sf(e / m - m / 2) - mpmath.e**e * sf(e / m + m / 2))


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("delta", [5e-324, 1e-100, 1e-12, 1e-5, 0.5])
@pytest.mark.parametrize("mu", [1e-6, 0.49, 0.51, 3.0, 50.0])
def test_the_closed_form_is_not_below_the_truth(mu: float, delta: float) -> None:
    found = gaussian.epsilon(mu, delta)
    assert log_delta(found, mu) <= mpmath.log(mpmath.mpf(delta)) + 1e-11
    if found > 0:
        assert log_delta(found * (1 - 1e-9), mu) > mpmath.log(mpmath.mpf(delta))


@pytest.mark.parametrize("rate", [1.0, 0.5, 1e-9])
@pytest.mark.parametrize("count", [1, 10**12])
@pytest.mark.parametrize("multiplier", [1e-300, 1e-200, 1e-154, 1e-100, 1e100, 1e200, 1e300])
def test_every_event_has_an_epsilon(multiplier: float, count: int, rate: float) -> None:
    found = epsilon_of([Event(multiplier, rate, count)], 1e-5)
    assert found > 1e199 if multiplier < 1 else found == 0


def test_many_tiny_releases_do_not_vanish() -> None:
    account = Account(1e-5, [Event(1e-200), Event(1e-200), Event(1.0)])
    assert account.epsilon() == math.inf
    assert Account(1e-5, [Event(1e200), Event(1e200)]).mu > 0
    assert Account.of_mu(1e200, 1, 1e-5).epsilon() == math.inf


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("target", [1e-6, 1.0, 8.0, 1e4])
@pytest.mark.parametrize("rounds", [1, 7, 300])
def test_a_calibrated_run_fits_a_budget_that_allows_nothing_above_it(
    tmp_path: Path, target: float, rounds: int
) -> None:
    privacy = Privacy(epsilon=target, trust="local")
    run = release(Facts("NormEC", 1.0, True, 100.0, 0.005), privacy, Setting(clients=10, rounds=rounds))
    sigma = run.sigma(target, privacy.delta)
    with Ledger(tmp_path / "ledger", privacy, rounds) as ledger:
        for k in range(rounds):
            assert ledger.spend(k, run.event(sigma, k), sigma).epsilon <= target
        with pytest.raises(BudgetSpent):
            ledger.spend(rounds, run.event(sigma, rounds), sigma)


def test_the_budget_has_no_slack(tmp_path: Path) -> None:
    """A release that brings ε a billionth above the budget is refused."""
    exact = gaussian.epsilon(1 / 3, 1e-5)
    for budget, fits in ((exact, True), (exact * (1 - 5e-10), False)):
        with Ledger(tmp_path / f"ledger {fits}", Privacy(epsilon=budget, trust="local"), 1) as ledger:
            if fits:
                ledger.spend(0, Event(3.0), 3.0)
            else:
                with pytest.raises(BudgetSpent):
                    ledger.spend(0, Event(3.0), 3.0)


def test_sigma_keeps_a_little_room() -> None:
    sigma = sigma_for(lambda s: Account(1e-5, [Event(s, 1.0, 300)]), 8.0)
    assert 8 * (1 - 1e-6) <= epsilon_of([Event(sigma, 1.0, 300)], 1e-5) <= 8 * (1 - 1e-11)
