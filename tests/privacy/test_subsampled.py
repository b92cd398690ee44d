"""Sampled Gaussians: against dp-accounting, against a convolution written here, and against the closed form."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from normec.privacy import accounting, gaussian, subsampled
from normec.privacy.accounting import Account, Event, epsilon_of, sigma_for
from normec.privacy.subsampled import Group, epsilon_pld, epsilon_rdp, interval

from ..support.work import peak_bytes


def by_dp_accounting(z: float, rate: float, rounds: int, delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), rounds)
    return float(accountant.get_epsilon(delta))


def by_convolution(z: float, rate: float, rounds: int, delta: float) -> float:
    """ε from the definition: histogram of one round's loss on a fine grid, convolved, in both directions."""
    h, x = 2e-4, np.linspace(-12 * z, 12 * z + 1, 1_000_001)
    plain = np.exp(-((x / z) ** 2) / 2)
    moved = np.exp(-(((x - 1) / z) ** 2) / 2)
    mixed, plain = (1 - rate) * plain + rate * moved, plain
    answers = []
    for p, q in ((mixed, plain), (plain, mixed)):
        keep = (p > 1e-30) & (q > 1e-30)
        loss, mass = np.log(p[keep] / q[keep]), p[keep] / p.sum()
        low = math.floor(loss.min() / h)
        bins = np.bincount(np.rint(loss / h).astype(int) - low, weights=mass)
        size = 1 << (rounds * len(bins)).bit_length()
        total = np.fft.irfft(np.fft.rfft(bins, size) ** rounds, size)
        values = (np.arange(size) + rounds * low) * h

        def excess(eps: float, total=total, values=values) -> float:
            above = values > eps
            return float(total[above] @ -np.expm1(eps - values[above])) - delta

        lo, hi = 0.0, float(values[-1])
        for _ in range(60):
            mid = (lo + hi) / 2
            lo, hi = (mid, hi) if excess(mid) > 0 else (lo, mid)
        answers.append(hi)
    return max(answers)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("z", "rate", "rounds"), [(1.0, 0.01, 300), (1.0, 0.1, 50), (5.0, 0.9, 300), (0.7, 0.02, 1000)]
)
def test_agrees_with_dp_accounting(z: float, rate: float, rounds: int) -> None:
    assert epsilon_of([Event(z, rate, rounds)], 1e-5) == pytest.approx(
        by_dp_accounting(z, rate, rounds, 1e-5), rel=1e-3
    )


def test_the_same_account_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Event(1.3, 0.1, 77), Event(5.0, 1.0, 3)]
    found = epsilon_of(events, 1e-5)
    monkeypatch.setattr(subsampled, "_one_round", lambda *_: pytest.fail("a distribution was computed again"))
    assert epsilon_of(events, 1e-5) == found


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("z", "rate", "rounds"), [(1.0, 0.2, 1), (1.0, 0.1, 16), (2.0, 0.5, 32)])
def test_agrees_with_a_convolution_written_out(z: float, rate: float, rounds: int) -> None:
    assert epsilon_of([Event(z, rate, rounds)], 1e-5) == pytest.approx(by_convolution(z, rate, rounds, 1e-5), rel=1e-3)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("z", "rounds"), [(10.396, 300), (7.3462, 300), (1.0, 1), (123.45, 42_300), (0.5, 100)])
def test_pld_and_closed_form_agree_where_both_apply(z: float, rounds: int) -> None:
    group = Group(z, 1 - 1e-9, rounds)
    exact = gaussian.epsilon(math.sqrt(rounds) / z, 1e-5)
    assert epsilon_pld((group,), 0.0, 1e-5, interval([group], 0.0, exact)) == pytest.approx(exact, rel=1e-3)
    google = dp_accounting.get_epsilon_gaussian(z / math.sqrt(rounds), 1e-5)
    assert exact == pytest.approx(google, rel=1e-3)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("z", "rate", "rounds"), [(1.0, 0.01, 300), (2.0, 0.1, 300), (0.5, 0.05, 20)])
def test_rdp_is_above_pld_and_not_far(z: float, rate: float, rounds: int) -> None:
    pld, rdp = epsilon_of([Event(z, rate, rounds)], 1e-5), epsilon_rdp((Group(z, rate, rounds),), 0.0, 1e-5)
    assert pld <= rdp <= 1.6 * pld


@pytest.mark.parametrize("delta", [1e-6, 0.3])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("kinds", [[(1.4, 0.4, 6)], [(0.6, 0.001, 5000)], [(20.0, 0.01, 3), (0.9, 0.05, 40)]])
def test_rdp_is_the_smallest_of_all_orders(kinds: list[tuple[float, float, int]], mu: float, delta: float) -> None:
    accountant = RdpAccountant(subsampled._ORDERS)
    for z, rate, rounds in kinds:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), rounds)
    if mu:
        accountant.compose(dp_accounting.GaussianDpEvent(1 / mu))
    found = epsilon_rdp(tuple(Group(*kind) for kind in kinds), mu, delta)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-12, abs=1e-12)


@pytest.mark.slow
def test_amplification_never_costs() -> None:
    for z, rate in [(0.05, 0.5), (1.0, 0.999999), (50.0, 0.99)]:
        plain = gaussian.epsilon(math.sqrt(300) / z, 1e-5)
        assert epsilon_of([Event(z, rate, 300)], 1e-5) <= plain


@pytest.mark.slow
def test_tiny_delta_falls_back_to_a_valid_bound() -> None:
    tiny, small = epsilon_of([Event(1.0, 0.01, 300)], 1e-15), epsilon_of([Event(1.0, 0.01, 300)], 1e-12)
    assert small < tiny < gaussian.epsilon(math.sqrt(300), 1e-15)


@pytest.mark.slow
def test_sampled_and_plain_releases_together() -> None:
    both = epsilon_of([Event(1.0, 0.01, 300), Event(10.0, 1.0, 20)], 1e-5)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 300)
    accountant.compose(dp_accounting.GaussianDpEvent(10.0), 20)
    assert both == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "rounds"), [(0.001, 0.5, 300), (0.05, 0.5, 300), (1.0, 0.1, 42_300)])
def test_hard_cases_stay_small(z: float, rate: float, rounds: int) -> None:
    assert peak_bytes(lambda: epsilon_of([Event(z, rate, rounds)], 1e-5)) < 50e6


@pytest.mark.slow
@given(st.floats(0.5, 20), st.floats(1.02, 2), st.floats(0.005, 0.5), st.floats(1.05, 2), st.integers(1, 2000))
@settings(max_examples=12, deadline=None)
def test_monotone_in_every_argument(z: float, more: float, rate: float, oftener: float, rounds: int) -> None:
    base = epsilon_of([Event(z, rate, rounds)], 1e-5)
    slack = 1 + 2e-4  # discretisation, always upward
    assert epsilon_of([Event(z * more, rate, rounds)], 1e-5) <= base * slack
    assert epsilon_of([Event(z, min(1.0, rate * oftener), rounds)], 1e-5) * slack >= base
    assert epsilon_of([Event(z, rate, 2 * rounds)], 1e-5) * slack >= base
    assert epsilon_of([Event(z, rate, rounds)], 1e-6) * slack >= base


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "rounds", "target"),
    [(1.0, 300, 8.0), (1.0, 42_300, 8.0), (1.0, 5, 1e-3), (0.1, 300, 8.0), (0.01, 300, 1.0)],
)
def test_sigma_for_keeps_the_target_and_comes_close(rate: float, rounds: int, target: float) -> None:
    def account(sigma: float) -> Account:
        return Account(1e-5, [Event(sigma, rate, rounds)])

    sigma = sigma_for(account, target)
    assert target * (1 - 1e-6) <= account(sigma).epsilon() <= target
    if rate == 1 and target == 8:
        assert sigma == pytest.approx({300: 10.396, 42_300: 123.45}[rounds], rel=5e-5)


@pytest.mark.parametrize("needed", [1, 2, 8, 9, 20])
def test_sigma_is_raised_to_the_first_that_suffices(needed: int) -> None:
    steps = [1.0]
    for k in range(needed):
        steps.append(steps[-1] * (1 + 1e-15 * 2**k))
    assert accounting._nudged(lambda sigma: sigma >= steps[needed], 1.0) == (steps[needed - 1], steps[needed])


@pytest.mark.slow
def test_running_epsilon_never_falls_short_and_ends_exact() -> None:
    account, previous, shown = Account(1e-5), 0.0, {}
    for k in range(1, 201):
        account.add(Event(1.2, 0.05))
        upper = account.upper(200)
        assert upper >= previous
        previous, shown[k] = upper, upper
    for k in (1, 7, 50, 133, 200):
        exact = epsilon_of([Event(1.2, 0.05, k)], 1e-5)
        assert exact * (1 - 1e-4) <= shown[k] <= exact * 1.25 + 0.2
    assert shown[200] == epsilon_of([Event(1.2, 0.05, 200)], 1e-5)
