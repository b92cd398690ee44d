"""The guarantee of the Gaussian mechanism by its closed form, with SciPy and without normec.

A mechanism that moves a Gaussian of standard deviation σ by at most Δ is μ-GDP with μ = Δ/σ; over several releases, the
squares of μ add up.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, mu**2 + 20 * mu, xtol=1e-12))


def gaussian_mu(epsilon: float, delta: float) -> float:
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-3, 50.0, xtol=1e-14))
