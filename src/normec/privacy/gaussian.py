"""Composed Gaussians in closed form: μ-GDP and its (ε, δ).

Formal guarantee. T adaptive releases N(m_k, σ²I) whose means move by at most Δ_k between neighbours are μ-GDP with
μ² = Σ Δ_k²/σ² (Dong, Roth, Su 2022), and that is exact when each Δ_k is reached. μ-GDP is, for every ε >= 0,

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2).

Numerics. With x = ε/μ − μ/2, y = ε/μ + μ/2 and Mills' ratio R = (1−Φ)/φ, e^ε φ(y) = φ(x), hence

    δ(ε) = φ(x) (R(x) − R(y)),

which has no cancellation of huge numbers. R(x) − R(y) is taken as it stands for μ >= 1/2 and as the integral of
−R' = 1 − tR(t) over [x, y] for smaller μ; for x < −5, where R overflows, as Φ(−x)(1 − R(y)/R(x)).

| | |
| --- | --- |
| μ = 0 | δ = 0 for every ε, ε = 0 for every δ |
| μ = ∞ | δ = 1, ε = ∞ |
| δ >= δ(0) | ε = 0 |
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

from ..errors import UsageError, needed, non_negative, open_unit

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


@cache
def _special() -> Any:
    return needed("scipy.special", "privacy")


@cache
def _nodes() -> list[tuple[float, float]]:
    """Gauss–Legendre nodes and weights on [−1, 1]; 16 are exact to rounding on intervals shorter than 1/2."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(16)
    return list(zip(nodes.tolist(), weights.tolist(), strict=True))


def _mills(x: float) -> float:
    return _SQRT_HALF_PI * float(_special().erfcx(x / math.sqrt(2)))


def _mills_slope(x: float) -> float:
    """−R'(x) = 1 − xR(x), by its asymptotic series where the difference would lose digits."""
    if x < 50:
        return 1 - x * _mills(x)
    square = 1 / (x * x)
    return square * (1 - square * (3 - square * (15 - square * (105 - 945 * square))))


def _log_delta_at(x: float, mu: float) -> float:
    """ln(φ(x) (R(x) − R(x + μ)))."""
    log_phi = -x * x / 2 - _LOG_SQRT_2PI
    if x < -5:
        log_sf = float(_special().log_ndtr(-x))
        return log_sf + math.log1p(-_mills(x + mu) * math.exp(log_phi - log_sf))
    if mu >= 0.5:
        gap = _mills(x) - _mills(x + mu)
    else:
        gap = mu / 2 * math.fsum(weight * _mills_slope(x + mu / 2 * (1 + node)) for node, weight in _nodes())
    return log_phi + math.log(gap) if gap > 0 else -math.inf


def log_delta(epsilon: float, mu: float) -> float:
    """ln δ(ε) of μ-GDP; −∞ where δ is 0."""
    if mu == 0:
        return -math.inf
    if mu == math.inf:
        return 0.0
    x = epsilon / mu - mu / 2
    return _log_delta_at(x, mu) if abs(x) < 1e150 or x < 0 else -math.inf


def _known_mu(mu: float) -> None:
    if not mu >= 0:  # infinity is allowed and means no noise
        raise UsageError(f"mu must be >= 0, got {mu}")


def delta(epsilon: float, mu: float) -> float:
    """The smallest δ for which μ-GDP implies (ε, δ)-DP."""
    non_negative(epsilon=epsilon)
    _known_mu(mu)
    return math.exp(log_delta(float(epsilon), float(mu)))


def epsilon(mu: float, delta: float) -> float:
    """The smallest ε >= 0 for which μ-GDP implies (ε, δ)-DP, rounded up in the last digits, never down.

    Solved for x = ε/μ − μ/2: since δ(ε) <= Φ(−x), the root lies in [−μ/2, −Φ⁻¹(δ)].
    """
    return _epsilon(float(mu), float(delta))


@lru_cache(maxsize=1024)  # an audit asks for those of the same rounds in each of its runs
def _epsilon(mu: float, delta: float) -> float:
    open_unit(delta=delta)
    _known_mu(mu)
    if mu > 1e150:
        return math.inf
    goal = math.log(delta)
    if log_delta(0.0, mu) <= goal:
        return 0.0
    top = max(-float(_special().ndtri(delta)) + 1e-9, -mu / 2)
    brentq = needed("scipy.optimize", "privacy").brentq
    if mu >= 1:
        x = float(brentq(lambda x: _log_delta_at(x, mu) - goal, -mu / 2, top, xtol=1e-14, rtol=1e-14))
        ratio = x + mu / 2
    else:  # ε/μ itself as the unknown keeps the digits of a tiny ε
        ratio = float(brentq(lambda t: log_delta(t * mu, mu) - goal, 0.0, top + mu / 2, xtol=1e-300, rtol=1e-14))
    answer = ratio * mu
    nudge = 1e-14
    while log_delta(answer, mu) > goal:
        answer *= 1 + nudge
        nudge *= 2
    return answer


def mu_for(epsilon_target: float, delta: float) -> float:
    """The largest μ whose ε at `delta` is at most `epsilon_target` (within rounding, from below)."""
    non_negative(epsilon=epsilon_target)
    open_unit(delta=delta)
    epsilon_target, delta = float(epsilon_target), float(delta)
    goal = math.log(delta)

    def excess(log_mu: float) -> float:
        return max(log_delta(epsilon_target, math.exp(log_mu)), -1e300) - goal

    low, high = 0.0, 0.0
    while excess(low) > 0:
        low -= 2.0
    while excess(high) <= 0:
        high += 2.0
    mu = math.exp(float(needed("scipy.optimize", "privacy").brentq(excess, low, high, xtol=1e-15, rtol=1e-15)))
    nudge = 1e-15
    while epsilon(mu, delta) > epsilon_target:
        mu *= 1 - nudge
        nudge *= 2
    return mu
