"""The search behind a private plan: where memory, step, noise, warm-up and forgetting are in balance."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import memory
from .constants import Constants
from .forgetting import noise_factor
from .numbers import Array
from .promises import promises, warmed_up

STAGES, FIRST, LATER, LOOKED_AT = 6, 3000, 1200, 3


class Choice(NamedTuple):
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
    """Random points, coarse to fine around the best: ranked by `quick`, judged by the tracked bound.

    Any point is a guarantee, so that a search that misses the optimum costs tightness, never truth.
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
        for place in np.argsort(quick(c, a, b, gamma, lam, rounds - warm, sigma, warm))[:LOOKED_AT]:
            tried = Choice(float(a[place]), float(b[place]), float(gamma[place]), float(lam[place]), int(warm[place]))
            promise = judged(c, tried, rounds, sigma)
            if promise < best:
                best, chosen, centre = promise, tried, points[place]
        width = width / 2
    return chosen, best


def judged(c: Constants, choice: Choice, rounds: int, sigma: float) -> float:
    """The tracked bound of a choice."""
    alpha, beta, gamma, decay, warmup = choice
    start = warmed_up(c, alpha, beta, decay, warmup)
    return float(promises(c, alpha, beta, np.asarray([gamma]), decay, rounds - warmup, start, sigma, warmup)[0])


def quick(c: Constants, a: Array, b: Array, gamma: Array, lam: Array, left: Array, sigma: float, warm: Array) -> Array:
    """A stand-in for `judged` without its recursion: errors fall by β a round to where they rest."""
    forgotten = lam * _reach(c, gamma, left)
    pull = np.maximum(b - gamma * c.L_max - forgotten, 1e-300)
    rest = np.where(pull > 1e-300, a * (gamma * c.L_max + forgotten) / pull, c.grad_max + gamma * c.L_max * left)
    rest = np.maximum(rest - gamma * c.L_max, np.asarray(memory.overshoot(a, b, lam))) + forgotten
    missing = np.maximum(c.grad_max - warm * b, 0)
    start = np.minimum(missing**2 / (2 * pull) / left, missing)
    noise = b * sigma * math.sqrt(c.dim / c.clients) * noise_factor(lam, left, warm) * np.where(lam > 0, 1, 2 / 3)
    return np.asarray(c.F0 / (gamma * left) + c.L * gamma / 2 + 2 * (rest + start + noise))


def _reach(c: Constants, gamma: Array, rounds: Array | int) -> Array:
    """B: the bound on gradients, or how far they can grow."""
    return np.minimum(c.grad_bound, c.grad_max + gamma * c.L_max * rounds)
