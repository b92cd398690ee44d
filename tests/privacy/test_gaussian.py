"""The closed form against mpmath, the known values, and monotonicity."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normec.errors import UsageError
from normec.privacy.accounting import Account, Event
from normec.privacy.gaussian import delta, epsilon, mu_for

PAPER = 7.3462


def reference(eps: float, mu: float) -> mpmath.mpf:
    """δ(ε) straight from its definition, with enough digits for the cancellation."""
    with mpmath.workprec(400):
        e, m = mpmath.mpf(eps), mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


def test_delta_has_twelve_digits_for_tiny_and_huge_mu() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(150):
        mu = 10 ** rng.uniform(-9, 3)
        ratio = rng.choice([0.0, rng.uniform(0, 8), rng.uniform(0, mu / 2 + 8)])
        expected = reference(ratio * mu, mu)
        if expected < 1e-250:
            continue
        checked += 1
        assert delta(ratio * mu, mu) == pytest.approx(float(expected), rel=1e-12)
    assert checked > 80


def test_delta_is_the_hockey_stick_by_direct_integration() -> None:
    x = np.linspace(-12, 14, 400_001)
    for mu, eps in [(0.3, 0.1), (1.0, 1.0), (2.0, 0.0), (3.0, 5.0)]:
        p, q = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0.0))
        assert delta(eps, mu) == pytest.approx(np.trapezoid(np.maximum(p - math.exp(eps) * q, 0), x), rel=1e-6)


@pytest.mark.parametrize(
    ("delta_round", "clients", "expected"),
    [(1, 1, 12.267), (2, 1, 30.519), (1, 10, 3.126), (2, 10, 7.002)],
)
def test_known_values_of_the_papers_noise(delta_round: int, clients: int, expected: float) -> None:
    mu = delta_round * math.sqrt(300 / clients) / PAPER
    assert epsilon(mu, 1e-5) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("sigma", "rounds", "expected"),
    [
        (PAPER, 42_300, (510, 1805, 76.1, 231)),
        (math.sqrt(PAPER), 300, (46.9, 135, 10.1, 24.7)),
        (PAPER / math.sqrt(269_722), 300, (7.5e5, 3.0e6, 7.7e4, 3.0e5)),
    ],
)
def test_table_of_the_papers_readings(sigma: float, rounds: int, expected: tuple[float, ...]) -> None:
    found = [epsilon(d * math.sqrt(rounds / n) / sigma, 1e-5) for n in (1, 10) for d in (1, 2)]
    assert found == pytest.approx(expected, rel=0.012)


def test_noise_for_epsilon_8() -> None:
    assert math.sqrt(300) / mu_for(8, 1e-5) == pytest.approx(10.396, abs=5e-4)
    assert math.sqrt(42_300) / mu_for(8, 1e-5) == pytest.approx(123.45, abs=5e-3)


@pytest.mark.parametrize("eps", [0.5, 1, 2, 4, 8, 10])
def test_constants_of_the_papers_formula(eps: float) -> None:
    constants = {0.5: 1.04, 1: 1.10, 2: 1.18, 4: 1.27, 8: 1.42, 10: 1.47}
    assert eps / (mu_for(eps, 1e-5) * math.sqrt(math.log(1e5))) == pytest.approx(constants[eps], abs=0.006)


def test_huge_epsilon_is_right_to_many_digits() -> None:
    for mu in (1e3, 2e3, 1e4):
        eps = epsilon(mu, 1e-5)
        assert eps > 1e5
        assert reference(eps, mu) <= mpmath.mpf("1.0000001e-5")
        assert reference(eps * (1 - 1e-9), mu) > mpmath.mpf("1e-5")


def test_edges() -> None:
    assert delta(1.0, 0.0) == 0
    assert epsilon(0.0, 1e-5) == 0
    assert delta(1.0, math.inf) == 1
    assert epsilon(math.inf, 1e-5) == math.inf
    assert epsilon(1e-6, 1e-5) == 0  # δ(0) is below δ already
    assert delta(0.0, 0.5) == pytest.approx(math.erf(0.5 / math.sqrt(8)), rel=1e-13)
    assert mu_for(0.0, 1e-5) == pytest.approx(1e-5 * math.sqrt(2 * math.pi), rel=1e-9)
    assert epsilon(0.01, 1e-300) > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: delta(math.nan, 1),
        lambda: delta(1, math.nan),
        lambda: delta(-1, 1),
        lambda: epsilon(math.nan, 0.1),
        lambda: epsilon(-1, 0.1),
        lambda: epsilon(1, math.nan),
        lambda: epsilon(1, 0),
        lambda: epsilon(1, 1),
        lambda: mu_for(math.nan, 0.1),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(UsageError):
        call()


mus = st.floats(1e-8, 1e5)
deltas = st.floats(1e-14, 0.5)


@pytest.mark.slow
@given(mus, mus, deltas)
@settings(max_examples=150, deadline=None)
def test_epsilon_grows_with_mu(a: float, b: float, d: float) -> None:
    low, high = sorted((a, b))
    assert epsilon(low, d) <= epsilon(high, d) * (1 + 1e-12)


@pytest.mark.slow
@given(mus, deltas, deltas)
@settings(max_examples=150, deadline=None)
def test_epsilon_falls_with_delta(mu: float, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert epsilon(mu, high) <= epsilon(mu, low) * (1 + 1e-12)


@given(st.floats(1e-4, 1e7), deltas)
@settings(max_examples=150, deadline=None)
def test_inverse_keeps_the_target_and_comes_close(eps: float, d: float) -> None:
    mu = mu_for(eps, d)
    assert eps * (1 - 1e-6) <= epsilon(mu, d) <= eps


@given(st.floats(0.5, 100), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_one_by_one_is_the_same_as_all_at_once(z: float, rounds: int) -> None:
    account = Account(1e-5)
    for _ in range(min(rounds, 400)):
        account.add(Event(z))
    assert account.mu == pytest.approx(math.sqrt(min(rounds, 400)) / z, rel=1e-15)


def test_numbers_of_single_precision_are_added_up_in_double_precision() -> None:
    z: Any = np.float32(1.1)
    d: Any = np.float32(1e-5)
    e: Any = np.float32(2.5)
    count: Any = np.int32(1000)
    plain = Account(float(d), [Event(float(z), count=1000)])
    assert Account(d, [Event(z, count=count)]).epsilon() == plain.epsilon()
    assert delta(e, z) == delta(float(e), float(z))
    assert mu_for(e, d) == mu_for(float(e), float(d))
