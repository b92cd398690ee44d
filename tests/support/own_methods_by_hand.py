"""The methods of `own_methods` as loops in NumPy, one client at a time, from their descriptions and without normec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vector = np.ndarray[Any, Any]


def clip(v: Vector, tau: float) -> Vector:
    length = np.linalg.norm(v)
    return v if length <= tau else v * (tau / length)


def smoothed(v: Vector, alpha: float) -> Vector:
    return v / (alpha + np.linalg.norm(v))


def run(
    name: str,
    gradients: Sequence[Callable[[Vector], Vector]],
    d: int,
    lr: float,
    chosen: Sequence[Sequence[int]],
) -> tuple[Vector, Vector]:
    """x after a round with each of the sets `chosen` of clients, and the last memory of every client."""
    n, x = len(gradients), np.zeros(d)
    memory = np.ones((n, d)) if name in ("client_init", "states of any shape") else np.zeros((n, d))
    momentum, rounds = np.zeros((n, d)), np.zeros(n)
    estimate, step = np.zeros(d), 0.0
    for drawn in chosen:
        total = np.zeros(d)
        for i, gradient in enumerate(gradients):
            if i not in drawn:
                if name == "absent":
                    memory[i] = 0
                if name == "states of any shape":
                    memory[i] *= 0.5
                continue
            g = gradient(x)
            if name == "no state":
                message = np.sign(g) / np.sqrt(d)
            elif name == "two states":
                momentum[i] = 0.7 * momentum[i] + 0.3 * g
                message = clip(momentum[i] - memory[i], 0.5)
                memory[i] = memory[i] + message
            elif name == "states of any shape":
                message = clip(g - memory[i] / (1 + rounds[i]), 2.0)
                memory[i], rounds[i] = 0.5 * g + 0.1 * message, rounds[i] + 1
            else:
                message = smoothed(g - memory[i], 0.1)
                if name == "message":
                    message = message[::-1]
                if name != "commit":
                    memory[i] = memory[i] + 0.3 * message
            total += message
        mean = total / n
        if name == "no state":
            direction = mean
        elif name == "two states":
            estimate = direction = estimate + mean
        elif name == "states of any shape":
            estimate = 0.5 * estimate + mean
            direction, step = estimate / (1 + step), step + 0.1
        elif name == "server_step":
            direction = np.zeros(d)
        else:
            estimate = estimate + 0.3 * mean
            direction = estimate / np.linalg.norm(estimate)
        x = x - lr * direction
    return x, memory
