"""Optimizers again, written out in plain NumPy from their formulas: no torch, no normec.

Each function makes the steps of one optimizer: `step(x, g, lr)` returns the next x. t counts the steps from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]
Step = Callable[[Vector, Vector, float], Vector]


def sgd() -> Step:
    return lambda x, g, lr: x - lr * g


def momentum(p: float, nesterov: bool = False) -> Step:
    """b ← p b + g; x ← x − lr b, or x − lr (g + p b)."""
    b = 0.0

    def step(x: Vector, g: Vector, lr: float) -> Vector:
        nonlocal b
        b = p * b + g
        return x - lr * (g + p * b if nesterov else b)

    return step


def adam(b1: float, b2: float, eps: float, weight_decay: float = 0.0, decoupled: bool = False) -> Step:
    """Kingma and Ba 2015, Algorithm 1; with decoupled weight decay Loshchilov and Hutter 2019, Algorithm 2."""
    m, v, t = 0.0, 0.0, 0

    def step(x: Vector, g: Vector, lr: float) -> Vector:
        nonlocal m, v, t
        t += 1
        if decoupled:
            x = x - lr * weight_decay * x
        else:
            g = g + weight_decay * x
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        return x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)

    return step


def rmsprop(alpha: float, eps: float) -> Step:
    """v ← α v + (1−α) g²; x ← x − lr g/(√v + ε)."""
    v = 0.0

    def step(x: Vector, g: Vector, lr: float) -> Vector:
        nonlocal v
        v = alpha * v + (1 - alpha) * g * g
        return x - lr * g / (np.sqrt(v) + eps)

    return step


def adam_bc(b1: float, b2: float, floor: float, variances: list[float]) -> Step:
    """Tang et al. 2023, Algorithm 1, with the mean of the rounds' noise variances, weighted like v̂."""
    m, v, t = 0.0, 0.0, 0

    def step(x: Vector, g: Vector, lr: float) -> Vector:
        nonlocal m, v, t
        t += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        weights = [(1 - b2) * b2 ** (t - j) for j in range(1, t + 1)]
        noise = sum(w * s for w, s in zip(weights, variances, strict=False)) / sum(weights)
        return x - lr * (m / (1 - b1**t)) / np.sqrt(np.maximum(v / (1 - b2**t) - noise, floor))

    return step
