"""Choose α, β, γ and the initial memories for given constants and a horizon, with the resulting guarantee.

Without noise, a large α = β is best: the messages are small, their β-multiples follow the gradients closely, and W of
Theorem 1 ("sharper") falls like 1/α. With noise, β has a cost; `search` balances memory, step, warm-up and decay by the
"tracked" bounds, which are guarantees for any choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import UsageError, at_least, below_one
from . import memory
from .argument_checks import Array, positive
from .constants import Constants
from .forgetting import noise_factor
from .guarantees import guarantees, warmed_up

# Of the search: its stages, the points of the first and of a later one, and how many of these are judged.
STAGES, FIRST, LATER, JUDGED = 6, 3000, 1200, 3
FOLLOW = 100.0  # α/(γL_max) without noise: the memory error is then about 1 % of a step's drift


@dataclass(frozen=True)
class Proposal:
    """Parameters and what they promise.

    `useful` says whether the promise is below ‖∇f(x⁰)‖, which is known before any training.

    Args:
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        gamma: The step size γ.
        decay: The forgetting λ of the memories.
        warmup: The number of rounds with γ = 0 among them.
        rounds: The number of rounds, warm-up included.
        initial_memory: How the memories start: "zero" or "gradient".
        R: A bound on the memories' errors after the warm-up.
        sigma: The noise that a client adds to its message, per coordinate; 0 without noise.
        promise: The bound on min_k ‖∇f(x^k)‖, or on its expectation under noise.
        trivial: ‖∇f(x⁰)‖.
        estimated: Whether the constants are estimates.

    Example:
        >>> from normec import theory
        >>> plan = propose(theory.quadratic_constants([[[2.0]], [[4.0]]], [[0.0], [0.0]], [1.0]), rounds=100)
        >>> plan.useful, plan.initial_memory
        (True, 'gradient')
    """

    alpha: float
    beta: float
    gamma: float
    decay: float
    warmup: int
    rounds: int
    initial_memory: str
    R: float
    sigma: float
    promise: float
    trivial: float
    estimated: bool

    @property
    def useful(self) -> bool:
        return self.promise < self.trivial

    def verdict(self) -> str:
        """The guarantee in one line."""
        if not self.useful:
            return (
                f"The promise is empty: it allows {self.promise:.4g}, and the start already has {self.trivial:.4g}. "
                "Training may still work; the theory cannot say so."
            )
        kind = "An estimate, no guarantee (L was estimated at the start)" if self.estimated else "Guaranteed"
        return f"{kind}: some gradient norm of at most {self.promise:.4g}; the start has {self.trivial:.4g}."


def propose(
    constants: Constants,
    rounds: int,
    sigma: float | None = None,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    decay: float | None = None,
) -> Proposal:
    """The parameters with the best promise for `rounds` messages of each client; those that are given stay as they are.

    Args:
        constants: The constants of the problem.
        rounds: The number of messages of a client.
        sigma: The noise that a client adds to each message, per coordinate. None means no noise, and the memories start
            at the first gradients. With noise they start at zero, and warm-up rounds count among `rounds`.
        alpha: A fixed α (default: chosen).
        beta: A fixed β (default: chosen).
        decay: A fixed λ (default: chosen).

    Returns:
        The parameters and what they promise.

    Raises:
        UsageError: A value is out of range, or the start is already a stationary point.

    Example:
        >>> from normec import theory
        >>> constants = theory.quadratic_constants([[[2.0]], [[4.0]]], [[0.0], [0.0]], [1.0])
        >>> plan = propose(constants, rounds=1000)
        >>> plan.promise < constants.grad0
        True
    """
    at_least(1, rounds=rounds)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None:
            positive(**{name: value})
    if decay is not None:
        below_one(decay=decay)
    if constants.F0 <= 0 or constants.grad0 <= 0:
        raise UsageError("the start is already a stationary point: there is nothing to plan")
    if sigma is None:
        return _clean(constants, rounds, alpha, beta, decay or 0.0)
    positive(sigma=sigma)
    rates = (None, 0.0) if decay is None else (decay,)
    tried = [search(constants, rounds, sigma, alpha, beta, rate) for rate in rates]
    chosen, promise = min(tried, key=lambda one: one[1])
    start = warmed_up(constants, chosen.alpha, chosen.beta, chosen.decay, chosen.warmup)
    return Proposal(
        chosen.alpha, chosen.beta, chosen.gamma, chosen.decay, chosen.warmup, rounds, "zero", start, sigma, promise,
        constants.grad0, constants.estimated,
    )  # fmt: skip


def _clean(c: Constants, rounds: int, alpha: float | None, beta: float | None, decay: float) -> Proposal:
    """The memory starts at the first gradients, so its error starts at 0 and R is a choice."""
    ideal = math.sqrt(2 * c.F0 / (c.L * rounds))  # the step size of normalised gradient descent
    a = alpha if alpha is not None else beta if beta is not None else FOLLOW * ideal * c.L_max
    b = beta if beta is not None else a
    steps = ideal * np.logspace(-4, 0.5, 200)
    found = guarantees(c, a, b, steps, decay, rounds, 0.0, 0.0, 0)
    best = int(np.argmin(found))
    gamma = float(steps[best])
    drift, B = gamma * c.L_max, min(c.grad_bound, c.grad_max + gamma * c.L_max * (rounds - 1))
    errors = memory.memory_errors(
        R0=0.0, alpha=a, beta=b, drift=drift, rounds=min(rounds, 10_000), decay=decay, B=B if decay else 0.0
    )
    R = float(errors.max()) + drift
    return Proposal(a, b, gamma, decay, 0, rounds, "gradient", R, 0.0, float(found[best]), c.grad0, c.estimated)


class Choice(NamedTuple):
    """The parameters of one point of the search."""

    alpha: float
    beta: float
    gamma: float
    decay: float
    warmup: int


# Logarithms to base 10 of: γ/(‖∇f(x⁰)‖/L), β/(γL_max), α/β, λ/λ*, warm-up/(R0/β); under −1.9 the last means none.
LOW = np.array([-5.0, -0.5, -2.0, -2.0, -2.0])
HIGH = np.array([0.5, 3.0, 1.5, 1.5, 0.3])


def search(
    c: Constants, rounds: int, sigma: float, alpha: float | None, beta: float | None, decay: float | None
) -> tuple[Choice, float]:
    """Random search, from coarse to fine around the best point: ranked by `quick`, judged by the tracked bound.

    Any point is a guarantee, so a search that misses the optimum loses tightness, but not validity.
    """
    draw = np.random.default_rng(0)
    centre, width = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    best, chosen = math.inf, Choice(1.0, 1.0, 1.0, 0.0, 0)
    for stage in range(STAGES):
        spread = draw.uniform(-1, 1, (FIRST if stage == 0 else LATER, len(LOW)))
        points = np.clip(centre + width * spread, LOW, HIGH)
        gamma = c.grad0 / c.L * 10 ** points[:, 0]
        b = gamma * c.L_max * 10 ** points[:, 1] if beta is None else np.full_like(gamma, beta)
        a = b * 10 ** points[:, 2] if alpha is None else np.full_like(gamma, alpha)
        balanced = gamma * c.L_max / _reach(c, gamma, rounds)
        lam = np.minimum(balanced * 10 ** points[:, 3], 0.5) if decay is None else np.full_like(gamma, decay)
        warm = np.minimum(np.ceil(c.grad_max / b * 10 ** points[:, 4]), rounds - 1) * (points[:, 4] > -1.9)
        for i in np.argsort(quick(c, a, b, gamma, lam, rounds - warm, sigma, warm))[:JUDGED]:
            tried = Choice(float(a[i]), float(b[i]), float(gamma[i]), float(lam[i]), int(warm[i]))
            promise = judged(c, tried, rounds, sigma)
            if promise < best:
                best, chosen, centre = promise, tried, points[i]
        width = width / 2
    return chosen, best


def judged(c: Constants, choice: Choice, rounds: int, sigma: float) -> float:
    """The tracked bound of a choice."""
    alpha, beta, gamma, decay, warmup = choice
    start = warmed_up(c, alpha, beta, decay, warmup)
    return float(guarantees(c, alpha, beta, np.asarray([gamma]), decay, rounds - warmup, start, sigma, warmup)[0])


def quick(c: Constants, a: Array, b: Array, gamma: Array, lam: Array, left: Array, sigma: float, warm: Array) -> Array:
    """An approximation of `judged` without its recursion: errors decrease by β per round to their limit."""
    forgotten = lam * _reach(c, gamma, left)
    pull = np.maximum(b - gamma * c.L_max - forgotten, 1e-300)
    rest = np.where(pull > 1e-300, a * (gamma * c.L_max + forgotten) / pull, c.grad_max + gamma * c.L_max * left)
    rest = np.maximum(rest - gamma * c.L_max, np.asarray(memory.overshoot(a, b, lam))) + forgotten
    missing = np.maximum(c.grad_max - warm * b, 0)
    start = np.minimum(missing**2 / (2 * pull) / left, missing)
    noise = b * sigma * math.sqrt(c.dim / c.clients) * noise_factor(lam, left, warm) * np.where(lam > 0, 1, 2 / 3)
    return np.asarray(c.F0 / (gamma * left) + c.L * gamma / 2 + 2 * (rest + start + noise))


def _reach(c: Constants, gamma: Array, rounds: Array | int) -> Array:
    """B, an upper bound on the clients' gradients: the problem's own, or what `rounds` steps can add to the first."""
    return np.minimum(c.grad_bound, c.grad_max + gamma * c.L_max * rounds)
