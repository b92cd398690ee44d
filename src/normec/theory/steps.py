"""The step size that a theorem backs, for a method whose other parameters are chosen: `lr = "theory"`."""

from __future__ import annotations

import math

import numpy as np

from ..algorithms.methods import Method
from ..algorithms.operators import SmoothedNorm
from ..errors import UsageError
from ..problems.objective import Objective
from .constants import Constants, constants_of
from .promises import promises, warmed_up
from .relatives import ef21_gamma


def step_size(
    problem: Objective,
    method: Method,
    rounds: int,
    *,
    warmup: int = 0,
    start: str = "zero",
    sigma: float = 0.0,
    lower: float | None = None,
) -> float:
    """γ with the best guarantee for this method, problem and horizon (with `warmup` rounds among `rounds`).

    NormEC with server normalisation: the γ that makes the tracked bound (Theorem 2's, or with forgetting) smallest.
    EF21: 1/(L + L̃√(b/θ)). GD: 1/L. Any other method has no guarantee here and is refused.
    """
    if warmup >= rounds:
        raise UsageError(f"warmup must be below the {rounds} rounds, got {warmup}")
    constants = constants_of(problem, lower=lower)
    if isinstance(method.operator, SmoothedNorm) and method.feedback and method.server_norm:
        return _normec(constants, method, method.operator.alpha, rounds, warmup, start, sigma)
    if method.name == "gd" and method.momentum == 0:
        return 1 / constants.L
    if method.name == "ef21" and method.decay == 0:
        left = method.operator.contraction(1.0, constants.dim) ** 2
        return float(ef21_gamma(L=constants.L, L_tilde=constants.L_tilde, contraction=1 - left))
    raise UsageError(
        f"no theorem gives a step size for {method.name} as it is set; lr='theory' is for normec with "
        "server_norm=true, ef21 and gd; give lr as a number"
    )


def _normec(c: Constants, method: Method, alpha: float, rounds: int, warmup: int, start: str, sigma: float) -> float:
    if alpha <= 0:
        raise UsageError("lr='theory' needs alpha > 0, got 0")
    if c.F0 <= 0:
        raise UsageError("the start is already a minimum: there is nothing to plan")
    before = 0.0 if start == "gradient" else warmed_up(c, alpha, method.beta, method.decay, warmup)
    ideal = math.sqrt(2 * c.F0 / (c.L * rounds))
    sizes = ideal * np.logspace(-4, 1, 300)
    found = promises(c, alpha, method.beta, sizes, method.decay, rounds - warmup, before, sigma, warmup)
    return float(sizes[int(np.argmin(found))])
