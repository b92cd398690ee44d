"""Poisson-sampled Gaussians by Google's dp-accounting: PLD for the number, RDP as a cross-check.

Formal guarantee. One round: with probability q the unit's vector s, ‖s‖ <= Δ, is part of a sum that gets N(0, σ²I).
In the zero-out relation the pair ((1−q)N(0, z²) + qN(1, z²), N(0, z²)) with z = σ/Δ dominates the round in both
directions, and dominating pairs compose adaptively (Zhu, Dong, Wang 2022). The PLD is discretised pessimistically
("connect the dots"), so the ε below is an upper bound of the true one.

Discretisation. The bound exceeds the truth by about T h²/4 for T rounds and interval h, as long as h is well under
the spread s of one round's loss. So h = min(sqrt(4·TOLERANCE·ε/T), s/32) with ε guessed by RDP, but never so fine
that one round has more than 2^16 points or all rounds together more than about 2^19: a call then takes a few
seconds at most, whatever ε and T, and what is lost is tightness, not validity. FFT convolutions carry absolute
errors near 1e-16, so for delta < 1e-12 the PLD is not used and the (looser, valid) RDP bound is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from normec.privacy.extras import needed

TOLERANCE = 2e-5
SMALLEST_DELTA = 1e-12
SMALLEST_SPREAD = 1e-5
_ORDERS = [1 + i / 10 for i in range(1, 20, 3)] + [*range(3, 64), *range(64, 257, 16), 512, 1024]


class Group(NamedTuple):
    """`releases` rounds with noise multiplier σ/Δ = `multiplier` and sampling rate `rate` < 1."""

    multiplier: float
    rate: float
    releases: int


def resolvable(groups: Sequence[Group], mu: float) -> tuple[tuple[Group, ...], float]:
    """Groups and μ that dominate the given ones and whose one-round loss is not lost in double precision.

    One round's loss spreads by about q·sqrt(e^(1/z²) − 1). Where that is under 1e-5 the rate is raised to reach it,
    and where no rate does, the round counts as not sampled: both only add to ε.
    """
    kept = []
    for group in groups:
        reach = math.sqrt(math.expm1(min(group.multiplier**-2.0, 700.0)))
        rate = max(group.rate, SMALLEST_SPREAD / reach)
        if rate < 1:
            kept.append(group._replace(rate=rate))
        else:
            mu = math.hypot(mu, math.sqrt(group.releases) / group.multiplier)
    return tuple(kept), mu


@lru_cache(maxsize=256)
def epsilon_rdp(groups: tuple[Group, ...], mu: float, delta: float) -> float:
    """ε by Rényi divergences of `groups` together with a μ-GDP mechanism: never below the truth, seldom tight."""
    dp = needed("dp_accounting", "privacy")
    absl = needed("absl.logging", "privacy")
    accountant = needed("dp_accounting.rdp", "privacy").RdpAccountant(_ORDERS)
    verbosity = absl.get_verbosity()
    absl.set_verbosity(absl.ERROR)  # it warns of every order it leaves out, which only loosens the bound
    try:
        for group in groups:
            sampled = dp.PoissonSampledDpEvent(group.rate, dp.GaussianDpEvent(group.multiplier))
            accountant.compose(sampled, group.releases)
        if mu > 0:
            accountant.compose(dp.GaussianDpEvent(1 / mu))
        return float(accountant.get_epsilon(delta))
    finally:
        absl.set_verbosity(verbosity)


@lru_cache(maxsize=256)
def _spread(multiplier: float, rate: float) -> tuple[float, float]:
    """Standard deviation and range of one round's privacy loss, by a plain sum over a fine grid."""
    unit = 1 / multiplier
    x = np.linspace(-10.0, 10.0 + unit, 4001)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + x * unit - unit**2 / 2)
    weight = (1 - rate) * np.exp(-(x**2) / 2) + rate * np.exp(-((x - unit) ** 2) / 2)
    weight /= weight.sum()
    mean = float(weight @ log_ratio)
    return math.sqrt(float(weight @ (log_ratio - mean) ** 2)), float(log_ratio[-1] - log_ratio[0])


def interval(groups: Sequence[Group], mu: float, guess: float) -> float:
    """The discretisation interval for a composition whose ε is about `guess` (see the head of this file)."""
    rounds = sum(group.releases for group in groups)
    spreads = [_spread(group.multiplier, group.rate) for group in groups]
    finest = min(spread for spread, _ in spreads) / 32
    variance = mu**2 + sum(g.releases * s**2 for g, (s, _) in zip(groups, spreads, strict=True))
    widest = max(width for _, width in spreads)
    step = min(math.sqrt(4 * TOLERANCE * max(guess, 1e-12) / rounds), finest)
    return max(step, widest / 2**16, (20 * math.sqrt(variance) + widest) / 2**19, 1e-12)


@lru_cache(maxsize=8)
def _one_round(multiplier: float, rate: float, step: float, log_tail: float) -> Any:
    module = needed("dp_accounting.pld.privacy_loss_distribution", "privacy")
    return module.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=step, log_mass_truncation_bound=log_tail
    )


def epsilon_pld(groups: Sequence[Group], mu: float, delta: float, step: float) -> float:
    """ε of `groups` composed with a μ-GDP mechanism, by privacy loss distributions of interval `step`."""
    log_tail = min(-50.0, math.log(delta) - 31.0)  # cut tails count as infinite loss: 2^24 of them are still < δ/1e6
    composed: Any = None
    try:
        with np.errstate(over="ignore"):  # e^loss at the far ends of a distribution, where infinity is meant
            for group in groups:
                part = _one_round(group.multiplier, group.rate, step, log_tail).self_compose(group.releases)
                composed = part if composed is None else composed.compose(part)
            if mu > 0:
                composed = composed.compose(_one_round(1 / mu, 1.0, step, log_tail))
            answer = float(composed.get_epsilon_for_delta(delta))
    except OverflowError:  # ε beyond 1e9 or so
        return math.inf
    return answer if answer >= 0 else math.inf
