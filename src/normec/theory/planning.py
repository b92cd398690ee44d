"""From constants and a horizon to α, β, γ, the start of the memories, and the promise that follows.

Without noise nothing speaks against α = β large: the messages are small, their β-multiples follow the gradients
closely, and W of Theorem 1 ("sharper") falls like 1/α. With noise every unit of β costs; `search` weighs
memory, step, warm-up and forgetting against each other by the "tracked" bounds, which are guarantees for any choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError, at_least
from . import memory
from .constants import Constants
from .numbers import positive
from .promises import promises, warmed_up
from .search import search

FOLLOW = 100.0  # α/(γL_max) without noise: the memory error is then about 1 % of a step's drift


@dataclass(frozen=True)
class Proposal:
    """Parameters and what they promise; `promise` is on min_k ‖∇f(x^k)‖ (its expectation under noise).

    `trivial` is ‖∇f(x⁰)‖, known before any training. `useful`: whether the promise says more than that.
    """

    alpha: float
    beta: float
    gamma: float
    decay: float
    warmup: int
    rounds: int  # with warm-up
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
        """One line for people."""
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
    """The parameters with the best promise for `rounds` messages a client; those that are given stay as they are.

    `sigma`: the noise a client adds to each of them, per coordinate; None: no noise, and the memories start at the
    first gradients. With noise they start at zero, and warm-up rounds count among `rounds`.
    """
    at_least(1, rounds=rounds)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None:
            positive(**{name: value})
    if decay is not None and not 0 <= decay < 1:
        raise UsageError(f"decay must lie in [0, 1), got {decay}")
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
    ideal = math.sqrt(2 * c.F0 / (c.L * rounds))  # normalised gradient descent's step
    a = alpha if alpha is not None else beta if beta is not None else FOLLOW * ideal * c.L_max
    b = beta if beta is not None else a
    steps = ideal * np.logspace(-4, 0.5, 200)
    found = promises(c, a, b, steps, decay, rounds, 0.0, 0.0, 0)
    best = int(np.argmin(found))
    gamma = float(steps[best])
    drift, B = gamma * c.L_max, min(c.grad_bound, c.grad_max + gamma * c.L_max * (rounds - 1))
    errors = memory.memory_errors(
        R0=0.0, alpha=a, beta=b, drift=drift, rounds=min(rounds, 10_000), decay=decay, B=B if decay else 0.0
    )
    R = float(errors.max()) + drift
    return Proposal(a, b, gamma, decay, 0, rounds, "gradient", R, 0.0, float(found[best]), c.grad0, c.estimated)
