"""The methods, two problems and the random streams again, in plain NumPy and Python: no torch, no normec.

A method runs K rounds, one client at a time, and returns what it saw: the path x⁰ … x^K and, if it has memories, the
memory errors before each round and the last memories and estimate. `drawn(k)` names the clients that send in round k.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Quadratics:
    """f_i(x) = ½ xᵀ A_i x − b_iᵀ x, with an A_i and a b_i of each client's own."""

    A: Vector
    b: Vector

    def loss(self, i: int, x: Vector) -> float:
        return float(x @ self.A[i] @ x / 2 - self.b[i] @ x)

    def grad(self, i: int, x: Vector) -> Vector:
        return self.A[i] @ x - self.b[i]

    def __len__(self) -> int:
        return len(self.A)


@dataclass
class Logistic:
    """f_i(x) = mean_j log(1 + exp(−y_j a_jᵀx)) + λ Σ x²/(1+x²), labels ±1, clients of any size."""

    a: list[Vector]
    y: list[Vector]
    lam: float

    def loss(self, i: int, x: Vector) -> float:
        margins = self.y[i] * (self.a[i] @ x)
        return float(np.mean(np.log1p(np.exp(-margins))) + self.lam * np.sum(x**2 / (1 + x**2)))

    def grad(self, i: int, x: Vector) -> Vector:
        margins = self.y[i] * (self.a[i] @ x)
        pull = -self.y[i] / (1 + np.exp(margins))
        return self.a[i].T @ pull / len(pull) + self.lam * 2 * x / (1 + x**2) ** 2

    def __len__(self) -> int:
        return len(self.a)


@dataclass
class Seen:
    path: list[Vector] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    memory: Vector | None = None
    estimate: Vector | None = None


def norm(v: Vector) -> float:
    return float(np.sqrt(np.sum(v * v)))


def unit(v: Vector) -> Vector:
    return v / norm(v) if norm(v) > 0 else v


def clip(v: Vector, tau: float) -> Vector:
    return v if norm(v) <= tau else v * (tau / norm(v))


def largest(v: Vector, k: int) -> Vector:
    out = np.zeros_like(v)
    for j in sorted(range(len(v)), key=lambda j: -abs(v[j]))[:k]:
        out[j] = v[j]
    return out


def normec(f, x, gamma, rounds, alpha, beta, server_norm, decay=0.0, memory=None, drawn=None) -> Seen:  # type: ignore[no-untyped-def]
    """Algorithm 1 without noise; `decay` makes memories and estimate forget."""
    n, d = len(f), len(x)
    g = np.zeros((n, d)) if memory is None else memory.copy()
    g_hat = g.sum(0) / n
    seen = Seen([x.copy()])
    for k in range(rounds):
        gradients = [f.grad(i, x) for i in range(n)]
        seen.errors.append(sum(norm(gradients[i] - g[i]) for i in range(n)) / n)
        g_hat = (1 - decay) * g_hat
        for i in range(n):
            difference = gradients[i] - g[i]
            g[i] = (1 - decay) * g[i]
            if drawn is None or i in drawn(k):
                m = difference / (alpha + norm(difference))
                g[i] = g[i] + beta * m
                g_hat = g_hat + beta / n * m
        x = x - gamma * (unit(g_hat) if server_norm else g_hat)
        seen.path.append(x.copy())
    seen.memory, seen.estimate = g, g_hat
    return seen


def error_feedback(f, x, gamma, rounds, psi, decay=0.0, memory=None, drawn=None) -> Seen:  # type: ignore[no-untyped-def]
    """Clip21 (psi clips) and EF21 (psi compresses): β = 1, no server normalisation. psi(v, client, round)."""
    n, d = len(f), len(x)
    g = np.zeros((n, d)) if memory is None else memory.copy()
    g_hat = g.sum(0) / n
    seen = Seen([x.copy()])
    for k in range(rounds):
        gradients = [f.grad(i, x) for i in range(n)]
        seen.errors.append(sum(norm(gradients[i] - g[i]) for i in range(n)) / n)
        g_hat = (1 - decay) * g_hat
        for i in range(n):
            difference = gradients[i] - g[i]
            g[i] = (1 - decay) * g[i]
            if drawn is None or i in drawn(k):
                m = psi(difference, i, k)
                g[i] = g[i] + m
                g_hat = g_hat + m / n
        x = x - gamma * g_hat
        seen.path.append(x.copy())
    seen.memory, seen.estimate = g, g_hat
    return seen


def dpsgd(f, x, gamma, rounds, psi: Callable[[Vector], Vector], drawn=None, momentum=0.0) -> Seen:  # type: ignore[no-untyped-def]
    """Eq. (2) without noise, and gradient descent where psi is the identity."""
    n = len(f)
    seen, velocity = Seen([x.copy()]), np.zeros_like(x)
    for k in range(rounds):
        total = np.zeros_like(x)
        for i in range(n):
            if drawn is None or i in drawn(k):
                total = total + psi(f.grad(i, x))
        velocity = momentum * velocity + total / n
        x = x - gamma * velocity
        seen.path.append(x.copy())
    return seen


def philox(counter: list[int], key: int) -> list[int]:
    """Philox 4x32-10 as published (Salmon et al. 2011), on Python's whole numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key % 2**32, key // 2**32 % 2**32
    for step in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        w0, w1 = (k0 + step * 0x9E3779B9) % 2**32, (k1 + step * 0xBB67AE85) % 2**32
        c0, c1, c2, c3 = high1 ^ c1 ^ w0, low1, high0 ^ c3 ^ w1, low0
    return [c0, c1, c2, c3]


def uniforms(seed: int, purpose: str, client: int, step: int, count: int) -> list[float]:
    """The stream's numbers: key from BLAKE2b, counter (position, client, step), two numbers a block."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little") // 2
    out: list[float] = []
    for position in range((count + 1) // 2):
        w = philox([position, client, step % 2**32, step // 2**32], key)
        for high, low in ((w[0], w[1]), (w[2], w[3])):
            out.append((((high * 2**31) ^ low) % 2**63 // 2**10) / 2**53)
    return out[:count]


def philox64(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10, word by word."""
    c0, c1, c2, c3 = counter
    w0, w1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(c2 * 0xCA5A826395121157, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ w0, low1, high0 ^ c3 ^ w1, low0
        w0, w1 = (w0 + 0x9E3779B97F4A7C15) % 2**64, (w1 + 0xBB67AE8584CAA73B) % 2**64
    return [c0, c1, c2, c3]


def coins(seed: int, purpose: str, step: int, count: int) -> list[float]:
    """The numbers that a round draws for all clients: counter (block, step), blocks from 1, four numbers a block."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little") // 2
    words = [word for block in range(count // 4 + 1) for word in philox64([block + 1, step, 0, 0], [key, 0])]
    return [word // 2**11 / 2**53 for word in words[:count]]


def seeded_noise(seed: int, name: str, round: int, count: int) -> Vector:
    """Standard normal noise of a round's sum by the definition of seeded noise: PCG64DXSM, keyed by the path."""
    path = [seed, name, "round", round, "attempt", 0, "sum"]
    key = int.from_bytes(hashlib.sha256(json.dumps(path).encode()).digest(), "little")
    return np.random.Generator(np.random.PCG64DXSM(key)).standard_normal(count)
