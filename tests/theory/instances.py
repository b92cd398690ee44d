"""Algorithm 1 in plain NumPy, over many small quadratics at once, written without the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass
class Many:
    """f_i(x) = ½ Σ_j h_ij (x_j − c_ij)²: h, c [m, n, d], x0 [m, d], with mean h > 0."""

    h: Array
    c: Array
    x0: Array

    def gradients(self, x: Array) -> Array:
        return self.h * (x[:, None] - self.c)

    def value(self, x: Array) -> Array:
        return 0.5 * (self.h * (x[:, None] - self.c) ** 2).sum(-1).mean(1)

    @property
    def constants(self) -> dict[str, Array]:
        mean = self.h.mean(1)
        best = (self.h * self.c).mean(1) / mean
        return {
            "L": np.abs(mean).max(-1),
            "L_max": np.abs(self.h).max((1, 2)),
            "F0": self.value(self.x0) - self.value(best),
        }


def random(m: int, n: int, d: int, seed: int) -> Many:
    rng = np.random.default_rng(seed)
    h = rng.uniform(-0.3, 1.0, (m, n, d)) * rng.uniform(0.3, 3, (m, 1, 1))
    h += np.maximum(0.05 - h.mean(1).min(-1), 0)[:, None, None]
    return Many(h, rng.normal(size=(m, n, d)) * rng.uniform(0.1, 3, (m, 1, 1)), rng.normal(size=(m, d)) * 3)


def start_memory(problem: Many, R: Array, rng: Any, steps: int = 1, local_lr: Array = 0.0) -> Array:
    """Memories at most R, and at one client exactly R, from the updates by local steps; from gradients if it is one."""
    grads = updates(problem, problem.x0, steps, local_lr)
    away = rng.normal(size=grads.shape)
    away /= np.linalg.norm(away, axis=-1, keepdims=True)
    size = rng.uniform(0, 1, grads.shape[:2])
    size[:, 0] = 1
    return grads - R[:, None, None] * size[..., None] * away


def updates(problem: Many, x: Array, steps: int, local_lr: Array) -> Array:
    """The clients' mean gradients on their paths of local steps from x, [m, n, d]."""
    y, total = np.broadcast_to(x[:, None], problem.h.shape), 0.0
    for _ in range(steps):
        slope = problem.h * (y - problem.c)
        y, total = y - np.broadcast_to(local_lr, len(x))[:, None, None] * slope, total + slope
    return total / steps


def normec(
    problem: Many, alpha: Array, beta: Array, gamma: Array, memory: Array, rounds: int, *, sigma: float = 0.0,
    decay: Array = 0.0, seed: int = 0, steps: int = 1, local_lr: Array = 0.0, coins: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """‖∇f(x^k)‖ [m, rounds], and the largest memory errors before and after each update [m, rounds].

    Memories follow the mean gradients on the paths of local steps, which are the gradients if there is one step. With
    coins [rounds, m, n] a client takes part where its coin is true, and errors after updates are means over clients.
    """
    rng = np.random.default_rng(seed)
    column = lambda v: np.broadcast_to(np.asarray(v, dtype=float), (len(problem.x0),))[:, None, None]  # noqa: E731
    a, b, lam = column(alpha), column(beta), column(decay)
    x, g = problem.x0.copy(), memory.copy()
    estimate = g.mean(1)
    norms, before, after = (np.empty((len(x), rounds)) for _ in range(3))
    for k in range(rounds):
        norms[:, k] = np.linalg.norm(problem.gradients(x).mean(1), axis=-1)
        grads = updates(problem, x, steps, local_lr)
        v = grads - g
        length = np.linalg.norm(v, axis=-1, keepdims=True)
        before[:, k] = length[..., 0].max(1)
        message = v / (a + length) * (1 if coins is None else coins[k][..., None])
        g = (1 - lam) * g + b * message
        left = np.linalg.norm(grads - g, axis=-1)
        after[:, k] = left.max(1) if coins is None else left.mean(1)
        sent = message + sigma * rng.normal(size=message.shape) if sigma else message
        estimate = (1 - lam[:, 0]) * estimate + b[:, 0] * sent.mean(1)
        size = np.linalg.norm(estimate, axis=-1, keepdims=True)
        x = x - column(gamma)[:, 0] * np.divide(estimate, size, out=np.zeros_like(estimate), where=size > 0)
    return norms, before, after
