"""The guarantee of given parameters on a problem, including warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory
from .argument_checks import Array
from .constants import Constants
from .forgetting import forgetting
from .private import theorem2


def warmed_up(c: Constants, alpha: float, beta: float, decay: float, warmup: int) -> float:
    """The memory error when x begins to move: the recursion with no drift, from ‖∇f_i(x⁰)‖."""
    if not warmup:
        return c.grad_max
    errors = memory.memory_errors(
        R0=c.grad_max, alpha=alpha, beta=beta, drift=0.0, rounds=warmup, decay=decay, B=c.grad_max
    )
    return float(errors[-1])


def guarantees(
    c: Constants, alpha: float, beta: float, gamma: Array, decay: float, rounds: int, start: float, sigma: float,
    warmup: int,
) -> Array:  # fmt: skip
    """The tracked bound for an array of step sizes, `rounds` after the warm-up: that of Theorem 2, or with decay."""
    common: dict[str, Any] = {
        "L": c.L, "L_max": c.L_max, "R": start, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds,
        "F0": c.F0, "sigma": sigma, "dim": c.dim, "clients": c.clients, "warmup": warmup, "form": "tracked",
    }  # fmt: skip
    if decay == 0:
        return np.asarray(theorem2(**common))
    B = np.minimum(c.grad_bound, c.grad_max + gamma * c.L_max * (rounds - 1))
    return np.asarray(forgetting(**common, decay=decay, B=B))
