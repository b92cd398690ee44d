"""The ε of Poisson-sampled Gaussians by Google's dp-accounting: the smaller of two upper bounds, PLD and RDP.

Formal guarantee. One round: with probability q the unit's vector s, ‖s‖ <= Δ, is part of a sum that gets N(0, σ²I).
In the zero-out relation the pair ((1−q)N(0, z²) + qN(1, z²), N(0, z²)) with z = σ/Δ dominates the round in both
directions, and dominating pairs compose adaptively (Zhu, Dong, Wang 2022). The PLD is discretised pessimistically
("connect the dots"), so in exact arithmetic its ε is an upper bound of the true one.

Discretisation. The bound exceeds the truth by about T h²/4 for T rounds and interval h, as long as h is well under
the spread s of one round's loss. So h = min(sqrt(4·TOLERANCE·ε/T), s/32) with ε guessed by RDP, but never so fine
that one round has more than 2^16 points or all rounds together more than about 2^19: a call then takes a few
seconds at most, whatever ε and T, and what is lost is tightness, not validity.

Rounding. In floating point the PLD's δ(ε) is too small by at most an absolute error E, so ε is taken where the
computed δ(ε) is δ − E, and the PLD is not used where E >= δ/2. With u = 2^-53, one round's masses p on n points of
total S, the composed masses q on N points, and weights 0 <= w_i <= 1 with δ(ε) = Σ w_i q_i:

1. One round. dp-accounting computes δ_i = δ(ε_i) of the pair as P(x_i) − exp(ε_i + log Q(x_i)) with two distribution
   functions, of relative error below 8u where they are not in their tails. log Q is at least −60 − R where the term
   counts, and |ε_i| <= R = nh, so that the error of δ_i is at most a = u(16 + 2(R + 60)). Where x_i lies does not
   matter to first order, for δ_i is a supremum over it. p_i is a second difference of the δ_i over e^h − 1, rounded
   with an error of at most 4u|δ_{i+1} − δ_i|/h. The curve that p stands for is D_j = Σ_{i>j} (1 − e^{ε_j − ε_i}) p_i.
   Since 1 − e^{−x} <= x, the error of D_j is at most a + 4u Σ_i i|δ_{i+1} − δ_i| <= κ = a + 4um, with m = Σ i p_i,
   the mean index. Masses that round below 0 are set to 0, which raises D. The pair is therefore dominated by p with κ
   more mass at infinity, and T rounds lose at most Tκ.
2. Transform. Every coefficient of a fast Fourier transform is a sum in which each p_i passes log2 N stages, so it is
   computed within c u log2(N) S, c = 8 (a stage of radix 2 to 11 needs at most 5.2 a bit). The T-th power multiplies
   the error by T|p̂_k|^{T−1}, and exp(T log p̂_k) adds a relative error of 8Tu.
3. Back. By Parseval and Cauchy–Schwarz the error of Σ w_i q_i is at most ‖w‖/√N times the error of q̂ in the 2-norm,
   and ‖w‖ <= √N. With F = √N‖q‖, ‖q̂‖ = F, and, by Hölder, ‖p̂^{T−1}‖ <= G = F^{1−1/T} N^{1/(2T)}. The inverse
   transform adds c u log2(N) F. Together T(c u log2(N) S G + 8uF) + c u log2(N) F.
4. Composition with other groups convolves with a probability vector, which leaves all the bounds above, and adds its
   own three transforms: 3 c u log2(N) F.
5. Truncation. Cut tails and the mass beyond the transform's window are counted as infinite loss by dp-accounting.

E is the sum of 1 to 4 for all groups, doubled: that covers what is of second order in u, and the sums over q, whose
relative error is Nu. It is between T·1e-12 and, with little noise and a small rate, T·1e-10. RDP has no such limit: it
is a few per cent looser, and it is used wherever it is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import needed

TOLERANCE = 2e-5
_ROUNDOFF = 2.0**-53
_STAGE = 8.0  # roundings of a fast Fourier transform per bit of its length
SMALLEST_SPREAD = 1e-5
LARGEST_EPSILON = 1e9  # above this a grid of losses overflows, and amplification is irrelevant
_ORDERS = [1 + i / 10 for i in range(1, 20, 3)] + [*range(3, 64), *range(64, 257, 16), 512, 1024]
_WHOLE = [order for order in _ORDERS if order == int(order)]
_FRACTIONAL = [order for order in _ORDERS if order not in _WHOLE]


class Group(NamedTuple):
    """`releases` rounds with noise multiplier σ/Δ = `multiplier` and sampling rate `rate` < 1."""

    multiplier: float
    rate: float
    releases: int


def resolvable(groups: Sequence[Group], mu: float) -> tuple[tuple[Group, ...], float]:
    """Groups and μ that dominate the given ones and whose one-round loss double precision can resolve.

    One round's loss spreads by about q·sqrt(e^(1/z²) − 1). If that is below 1e-5, the rate is raised to reach it,
    and if no rate does, the round counts as not sampled. Both can only increase ε.
    """
    kept = []
    for group in groups:
        reach = math.sqrt(math.expm1(min(group.multiplier**-2.0, 700.0)))
        if reach > SMALLEST_SPREAD:
            kept.append(group._replace(rate=max(group.rate, SMALLEST_SPREAD / reach)))
        else:
            mu = math.hypot(mu, math.sqrt(group.releases) / group.multiplier)
    return tuple(kept), mu


@lru_cache(maxsize=4096)
def epsilon_rdp(groups: tuple[Group, ...], mu: float, delta: float) -> float:
    """ε by Rényi divergences of `groups` together with a μ-GDP mechanism: an upper bound, rarely tight.

    It is the smallest ε of all orders. Divergences of fractional and of high orders take most of the time, and hardly
    any of them can be the smallest: a divergence is at least that of a lower order, which bounds its ε from below. The
    order 1 bounds them all; half of its divergence by a plain sum leaves room for the error of that sum.
    """
    module = needed("dp_accounting.rdp", "privacy")
    curves = [(group.releases, _curve(group.multiplier, group.rate)) for group in groups]

    def divergence(order: float) -> float:
        return sum((releases * curve(order) for releases, curve in curves), start=mu * mu / 2 * order)

    def smallest(orders: Sequence[float], divergences: Sequence[float]) -> float:
        return float(module.compute_epsilon(orders, divergences, delta)[0])

    def least(order: float, divergence: float) -> float:
        return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    lowest = (mu * mu / 2 + sum(g.releases * _loss(g.multiplier, g.rate).mean for g in groups)) / 2
    if not lowest > -math.log1p(-(delta**2)):  # so little loss that another bound holds, which may be 0
        return smallest(_ORDERS, [divergence(order) for order in _ORDERS])
    best, below, rest = math.inf, lowest, min(least(order, 0.0) for order in _WHOLE)
    for order in _WHOLE:
        if below + rest > best:
            break
        below = divergence(order)
        best = min(best, smallest([order], [below]))
    for order in _FRACTIONAL:
        if least(order, lowest) <= best:
            best = min(best, smallest([order], [divergence(order)]))
    return best


@lru_cache(maxsize=4096)  # as many kinds of releases as a server may have asked a party for
def _curve(multiplier: float, rate: float) -> Callable[[float], float]:
    """The Rényi divergence of one round as a function of the order, each computed once."""
    dp = needed("dp_accounting", "privacy")
    absl = needed("absl.logging", "privacy")
    module = needed("dp_accounting.rdp", "privacy")
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))
    known: dict[float, float] = {}

    def divergence(order: float) -> float:
        if order not in known:
            accountant = module.RdpAccountant([order])
            verbosity = absl.get_verbosity()
            absl.set_verbosity(absl.ERROR)  # it warns of every order that it leaves out, which only loosens the bound
            try:
                accountant.compose(event)
                known[order] = float(accountant.rdp[0])
            finally:
                absl.set_verbosity(verbosity)
        return known[order]

    return divergence


class Loss(NamedTuple):
    """Mean, standard deviation and range of one round's privacy loss."""

    mean: float
    spread: float
    width: float


@lru_cache(maxsize=256)
def _loss(multiplier: float, rate: float) -> Loss:
    """One round's privacy loss, by a plain sum over a fine grid."""
    unit = 1 / multiplier
    x = np.linspace(-10.0, 10.0 + unit, 4001)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + x * unit - unit**2 / 2)
    weight = (1 - rate) * np.exp(-(x**2) / 2) + rate * np.exp(-((x - unit) ** 2) / 2)
    weight /= weight.sum()
    mean = float(weight @ log_ratio)
    return Loss(mean, math.sqrt(float(weight @ (log_ratio - mean) ** 2)), float(log_ratio[-1] - log_ratio[0]))


def interval(groups: Sequence[Group], mu: float, guess: float) -> float:
    """The discretisation interval for a composition whose ε is about `guess` (see the docstring of this module)."""
    rounds = sum(group.releases for group in groups)
    losses = [_loss(group.multiplier, group.rate) for group in groups]
    finest = min(loss.spread for loss in losses) / 32
    variance = mu**2 + sum(g.releases * loss.spread**2 for g, loss in zip(groups, losses, strict=True))
    widest = max(loss.width for loss in losses)
    step = min(math.sqrt(4 * TOLERANCE * max(guess, 1e-12) / rounds), finest)
    return max(step, widest / 2**16, (20 * math.sqrt(variance) + widest) / 2**19, 1e-12)


@lru_cache(maxsize=32)
def _one_round(multiplier: float, rate: float, step: float, log_tail: float) -> Any:
    module = needed("dp_accounting.pld.privacy_loss_distribution", "privacy")
    return module.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=step, log_mass_truncation_bound=log_tail
    )


@lru_cache(maxsize=4096)  # the search for σ, the check of what it found and every repeated run ask for the same ones
def epsilon_pld(groups: tuple[Group, ...], mu: float, delta: float, step: float) -> float:
    """ε of `groups` composed with a μ-GDP mechanism, by privacy loss distributions of interval `step`.

    It is an upper bound, and infinite if rounding errors could reach half of `delta` (see the module docstring).
    """
    # Truncated tails count as infinite loss; 2^24 of them are still < δ/1e6.
    log_tail = min(-50.0, math.log(delta) - 31.0)
    parts = [(group.multiplier, group.rate, group.releases) for group in groups]
    if mu > 0:
        parts.append((1 / mu, 1.0, 1))
    composed: Any = None
    error = 0.0
    try:
        with np.errstate(over="ignore"):  # e^loss at the far ends of a distribution, where infinity is meant
            for multiplier, rate, releases in parts:
                one = _one_round(multiplier, rate, step, log_tail)
                error += _error_of_rounds(one, releases, step)
                if error >= delta / 2:
                    return math.inf
                part = one.self_compose(releases)
                error += _error_of_transforms(one, part, releases)
                composed = part if composed is None else composed.compose(part)
            if error >= delta / 2:
                return math.inf
            answer = float(composed.get_epsilon_for_delta(delta - error))
            if not answer >= 0 or math.isinf(answer):
                return math.inf
            nudge = 1e-12 * (answer + step)
            while composed.get_delta_for_epsilon(answer) > delta - error:  # the search above sums less exactly
                answer, nudge = answer + nudge, 2 * nudge
    except OverflowError:  # ε beyond 1e9 or so
        return math.inf
    return answer


def _masses(distribution: Any) -> list[Any]:
    """One distribution's masses on its grid, for both directions of the relation."""
    kinds = (distribution._pmf_remove, distribution._pmf_add)
    return [kind.to_dense_pmf()._probs for kind in kinds]


def _error_of_rounds(one: Any, releases: int, step: float) -> float:
    """The error of δ from rounding the masses of all rounds: step 1 of the derivation, doubled."""
    worst = max(2 * step * len(masses) + 4 * float(masses @ np.arange(len(masses))) for masses in _masses(one))
    return 2 * releases * _ROUNDOFF * (136 + worst)


def _error_of_transforms(one: Any, part: Any, releases: int) -> float:
    """The error of δ from the Fourier transforms of a group: steps 2 to 4 of the derivation, doubled."""
    worst = 0.0
    for before, after in zip(_masses(one), _masses(part), strict=True):
        size = 2.0 * max(len(before), len(after))  # at least the length that was transformed
        stages = _STAGE * _ROUNDOFF * math.log2(size)
        norm = math.sqrt(size) * float(np.linalg.norm(after))
        earlier = norm ** (1 - 1 / releases) * size ** (1 / (2 * releases))
        power = releases * (stages * float(before.sum()) * earlier + 8 * _ROUNDOFF * norm)
        worst = max(worst, power + 4 * stages * norm)
    return 2 * worst
