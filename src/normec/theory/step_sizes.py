"""Step sizes with a guarantee, for a method whose other parameters are given: `lr = "theory"`."""

from __future__ import annotations

import math

import numpy as np

from ..algorithms.client_momentum import Clip21SGD2M
from ..algorithms.direct import GD
from ..algorithms.error_feedback import EF21, NormEC
from ..algorithms.method import Method
from ..errors import UsageError
from ..problems.objective import Objective
from .client_momentum import clip21_sgd2m, clip21_sgd2m_gamma
from .constants import Constants
from .guarantees import guarantees, warmed_up
from .other_methods import ef21_gamma
from .problem_constants import constants_of


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
    """γ with the best guarantee for this method, problem and horizon.

    NormEC with server normalisation: the γ that minimises the tracked bound (of Theorem 2, or with decay).
    Clip21-SGD2M without decay, noise and warm-up: the γ that minimises `clip21_sgd2m`. EF21: 1/(L + L̃√(b/θ)). GD: 1/L.
    Any other method has no guarantee here and is refused.

    Args:
        problem: The problem that is minimised.
        method: The method, with its parameters.
        rounds: The number of rounds, with `warmup` rounds among them.
        warmup: The number of rounds with γ = 0.
        start: How the memories start: "zero" or "gradient".
        sigma: The noise that a client adds to its message, per coordinate.
        lower: A number that f never falls below; see `constants_of`.

    Returns:
        The step size.

    Raises:
        UsageError: No theorem covers the method, no step size has a finite bound, or `warmup` is not below `rounds`.

    Example:
        >>> import torch
        >>> from normec import Problem
        >>> problem = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(3, dtype=torch.float64))
        >>> round(step_size(problem, GD(), rounds=10, lower=0.0), 6)  # 1/L
        0.5
    """
    if warmup >= rounds:
        raise UsageError(f"warmup must be below the {rounds} rounds, got {warmup}")
    covered = {
        NormEC: getattr(method, "server_norm", False),
        Clip21SGD2M: not (getattr(method, "decay", 0.0) or sigma or warmup) and getattr(method, "beta", 1.0) <= 1,
        EF21: True,
        GD: True,
    }
    if not covered.get(type(method), False):
        raise UsageError(
            f"no theorem gives a step size for {method.name} as it is set; lr='theory' is for normec with "
            "server_norm=true, clip21-sgd2m with beta at most 1 and without decay, noise and warm-up, ef21 and gd; "
            "give lr as a number"
        )
    constants = constants_of(problem, lower=lower)
    if isinstance(method, NormEC):
        return _normec(constants, method, rounds, warmup, start, sigma)
    if isinstance(method, Clip21SGD2M):
        return _clip21_sgd2m(constants, method, rounds, start)
    if isinstance(method, EF21):
        left = method.operator.contraction(1.0, constants.dim) ** 2
        return float(ef21_gamma(L=constants.L, L_tilde=constants.L_tilde, contraction=1 - left))
    return 1 / constants.L


def _normec(c: Constants, method: NormEC, rounds: int, warmup: int, start: str, sigma: float) -> float:
    alpha = method.alpha
    if alpha <= 0:
        raise UsageError("lr='theory' needs alpha > 0, got 0")
    if c.F0 <= 0:
        raise UsageError("the start is already a minimum: there is nothing to plan")
    before = 0.0 if start == "gradient" else warmed_up(c, alpha, method.beta, method.decay, warmup)
    ideal = math.sqrt(2 * c.F0 / (c.L * rounds))
    sizes = ideal * np.logspace(-4, 1, 300)
    found = guarantees(c, alpha, method.beta, sizes, method.decay, rounds - warmup, before, sigma, warmup)
    return float(sizes[int(np.argmin(found))])


def _clip21_sgd2m(c: Constants, method: Clip21SGD2M, rounds: int, start: str) -> float:
    settled = float(clip21_sgd2m_gamma(L=c.L, L_max=c.L_max, beta=method.beta, client_momentum=method.client_momentum))
    sizes = np.geomspace(min(1e-5 / c.L, settled), 1 / c.L, 200)
    found = clip21_sgd2m(
        L=c.L,
        L_max=c.L_max,
        F0=c.F0,
        tau=method.tau,
        beta=method.beta,
        client_momentum=method.client_momentum,
        gamma=sizes,
        rounds=rounds,
        average_error=0.0 if start == "gradient" else c.grad_max,
    )
    best = int(np.argmin(found))
    if not np.isfinite(found[best]):
        raise UsageError(
            f"no step size from {sizes[0]:.3g} to 1/L = {sizes[-1]:.3g} has a finite bound for clip21-sgd2m with "
            f"tau = {method.tau:.6g}, beta = {method.beta:.6g} and client_momentum = {method.client_momentum:.6g} over "
            f"{rounds} rounds: while messages are clipped, the bounds of the errors outgrow all numbers; "
            "take a larger tau or fewer rounds, or give lr as a number"
        )
    return float(sizes[best])
