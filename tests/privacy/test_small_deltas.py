"""ε stays an upper bound where δ is small and the rounds are many, against computations that do not share our code."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from normec.privacy import gaussian
from normec.privacy.accounting import Account, Event, epsilon_of
from normec.privacy.subsampled import Group, epsilon_pld, epsilon_rdp, interval


def epsilon_of_one_round(z: float, rate: float, delta: float) -> float:
    """The larger root of δ(ε) = δ over the two directions, by 60-digit arithmetic from the definition."""
    with mpmath.workdps(60):

        def sf(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        def removed(eps: mpmath.mpf) -> mpmath.mpf:
            x = z**2 * mpmath.log((mpmath.e**eps - 1 + rate) / rate) + mpmath.mpf(1) / 2
            return rate * sf((x - 1) / z) + (1 - rate) * sf(x / z) - mpmath.e**eps * sf(x / z)

        low, high = mpmath.mpf(0), mpmath.mpf(200)
        for _ in range(150):
            middle = (low + high) / 2
            low, high = (middle, high) if removed(middle) > delta else (low, middle)
        return float(high)


def epsilon_by_tilting(z: float, rate: float, rounds: int, delta: float, h: float) -> float:
    """ε of the removal direction: one round's loss on a fine grid, tilted so that the tail is where the mass is.

    The tilt e^{λ loss} makes the relative error of a Fourier transform small in the tail instead of at the mean.
    Each mass goes to the two grid points around its loss in the ratio that keeps the mean.
    """
    x = np.linspace(-9 * z, 9 * z + 1, 200_001)
    density = np.logaddexp(math.log1p(-rate) - (x / z) ** 2 / 2, math.log(rate) - ((x - 1) / z) ** 2 / 2) - math.log(
        z * math.sqrt(2 * math.pi) / (x[1] - x[0])
    )
    loss = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z**2))
    tilt = min(
        (t for t in np.geomspace(0.5, 200, 25)),
        key=lambda t: (rounds * np.logaddexp.reduce(density + t * loss) - math.log(delta)) / t,
    )
    log_moment = float(np.logaddexp.reduce(density + tilt * loss))
    mass = np.exp(density + tilt * loss - log_moment)
    place = loss / h
    low = math.floor(place.min())
    left = np.floor(place).astype(int)
    size = int(left.max()) - low + 2
    bins = np.bincount(left - low, (1 - (place - left)) * mass, size) + np.bincount(
        left - low + 1, (place - left) * mass, size
    )
    mean, spread = float(mass @ loss), math.sqrt(float(mass @ loss**2) - float(mass @ loss) ** 2)
    width = 1 << math.ceil(math.log2(max(24 * spread * math.sqrt(rounds) / h, 2 * size)))
    composed = np.fft.irfft(np.fft.rfft(bins, width) ** rounds, width)
    first = round(rounds * mean / h) - width // 2
    values = (np.arange(width) + first) * h
    composed = composed[(np.arange(width) + first - rounds * low) % width]

    def log_delta(eps: float) -> float:
        above = values > eps
        weights = -np.expm1(eps - values[above]) * np.exp(-tilt * (values[above] - eps))
        total = float(weights @ composed[above])  # far in the tail the transform's rounding may leave it negative
        return (math.log(total) if total > 0 else -math.inf) + rounds * log_moment - tilt * eps

    low_eps, high_eps = float(values[0]), float(values[-2])
    for _ in range(60):
        middle = (low_eps + high_eps) / 2
        low_eps, high_eps = (middle, high_eps) if log_delta(middle) > math.log(delta) else (low_eps, middle)
    return high_eps


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-12, 1e-14])
@pytest.mark.parametrize(("z", "rate"), [(1.0, 0.1), (5.0, 0.01), (0.3, 0.5)])
def test_one_round_against_exact_arithmetic(z: float, rate: float, delta: float) -> None:
    exact, found = epsilon_of_one_round(z, rate, delta), epsilon_of([Event(z, rate, 1)], delta)
    assert exact <= found
    assert delta < 1e-10 or found <= 1.05 * exact + 1e-3  # below, RDP has to do, and is loose for one round


@pytest.mark.slow
def test_the_tilted_convolution_knows_the_closed_form() -> None:
    """The reference of the next test, where the answer is known: all take part, and δ is tiny."""
    exact = gaussian.epsilon(math.sqrt(20_000) / 40.0, 1e-14)
    assert epsilon_by_tilting(40.0, 1 - 1e-12, 20_000, 1e-14, 2e-4) == pytest.approx(exact, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z", "rate", "rounds", "delta", "h"),
    [(40.0, 0.3, 200_000, 1e-12, 1e-4), (10.0, 0.1, 20_000, 1e-11, 2e-4), (2.0, 0.05, 3_000, 1e-9, 5e-4)],
)
def test_many_rounds_against_a_tilted_convolution(z: float, rate: float, rounds: int, delta: float, h: float) -> None:
    reference = epsilon_by_tilting(z, rate, rounds, delta, h)
    found = epsilon_of([Event(z, rate, rounds)], delta)
    assert reference * (1 - 5e-5) <= found <= 1.1 * reference
    assert found <= epsilon_rdp((Group(z, rate, rounds),), 0.0, delta)


@pytest.mark.parametrize(
    ("z", "rounds", "delta"), [(500.0, 800_000, 8e-12), (100.0, 800_000, 8e-12), (10.4, 300, 1e-11), (10.4, 300, 1e-9)]
)
def test_the_pld_is_not_below_the_closed_form(z: float, rounds: int, delta: float) -> None:
    """At rate 1 − 1e-9 the truth is the closed form's to nine digits; the PLD may say that it does not know."""
    group = Group(z, 1 - 1e-9, rounds)
    exact = gaussian.epsilon(math.sqrt(rounds) / z, delta)
    assert epsilon_pld((group,), 0.0, delta, interval([group], 0.0, exact)) >= exact * (1 - 1e-8)


def test_a_typical_delta_loses_next_to_nothing() -> None:
    group = Group(123.45, 1 - 1e-9, 42_300)
    exact = gaussian.epsilon(math.sqrt(42_300) / 123.45, 1e-5)
    assert exact <= epsilon_pld((group,), 0.0, 1e-5, interval([group], 0.0, exact)) <= exact * (1 + 1e-3)


@pytest.mark.slow
def test_epsilon_is_never_above_rdp_or_the_unamplified_bound() -> None:
    for z, rate, rounds, delta in [(1.0, 0.01, 300, 1e-13), (0.8, 0.3, 50, 1e-6), (30.0, 0.9, 1000, 1e-10)]:
        found = epsilon_of([Event(z, rate, rounds)], delta)
        assert found <= epsilon_rdp((Group(z, rate, rounds),), 0.0, delta)
        assert found <= gaussian.epsilon(math.sqrt(rounds) / z, delta)


@pytest.mark.slow
def test_the_running_bound_holds_beside_plain_releases() -> None:
    """μ is rounded up to a grid for the running bound; a μ on the grid must not come out a digit lower."""
    for k in (-33, -16, -5, 0):
        mu = 2 ** (k / 16)
        account = Account.of_mu(mu, 1, 1e-5)
        account.add(Event(50.0, 0.5))
        assert account.upper(1) >= gaussian.epsilon(mu, 1e-5) * (1 - 1e-12)
