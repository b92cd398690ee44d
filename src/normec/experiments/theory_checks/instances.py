"""Batches of random problems, [instances, clients, d] in float64, on which the methods themselves run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Method
from ...theory.constants import Constants, quadratic_constants


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = ½(x − c_i)ᵀH_i(x − c_i): H [m, n, d, d], c [m, n, d], from x0 [m, d]. Not every H_i is positive."""

    H: Tensor
    c: Tensor
    x0: Tensor

    def gradients(self, x: Tensor) -> Tensor:
        """Return the gradients [m, n, d] at x [m, d]."""
        return self.own_gradients(x[:, None])

    def own_gradients(self, y: Tensor) -> Tensor:
        """Return the gradients [m, n, d] where every client is at a point of its own, y [m, n, d]."""
        return torch.einsum("mnij,mnj->mni", self.H, y - self.c)

    def updates(self, x: Tensor, steps: int, local_lr: Tensor) -> Tensor:
        """Return the mean gradients [m, n, d] on the clients' paths of local steps from x; `local_lr` is [m]."""
        y, total = x[:, None].expand_as(self.c), torch.zeros_like(self.c)
        for _ in range(steps):
            slope = self.own_gradients(y)
            y, total = y - local_lr[:, None, None] * slope, total + slope
        return total / steps

    def repeated(self, times: int) -> Quadratics:
        return Quadratics(*(part.repeat_interleave(times, 0) for part in (self.H, self.c, self.x0)))

    def constants(self) -> list[Constants]:
        return [
            quadratic_constants(*(part.numpy() for part in one)) for one in zip(self.H, self.c, self.x0, strict=True)
        ]


def draw(instances: int, clients: int, dim: int, seed: int) -> Quadratics:
    """Draw heterogeneous clients, with different minima and spectra; some have directions of negative curvature."""
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.normal(size=(instances, clients, dim, dim)))
    spectrum = random.uniform(-0.2, 1.0, (instances, clients, dim)) * random.uniform(0.5, 2.0, (instances, clients, 1))
    H = np.einsum("mnij,mnj,mnkj->mnik", basis, spectrum, basis)
    least = np.linalg.eigvalsh(H.mean(1))[:, :1, None, None]
    H = H + np.maximum(0.05 - least, 0) * np.eye(dim)  # so that f has a minimum
    c, x0 = random.normal(size=(instances, clients, dim)), 3 * random.normal(size=(instances, dim))
    return Quadratics(*(torch.from_numpy(part) for part in (H, c, x0)))


@dataclass(frozen=True)
class PseudoHuber:
    """Pseudo-Huber losses f_i(x) = w²(√(1 + ‖x−c_i‖²/w²) − 1), with centres c [m, n, d].

    L_i = 1, ‖∇f_i‖ ≤ w and f_i ≥ 0; the width w = ∞ gives ½‖x−c_i‖².
    """

    c: Tensor
    x0: Tensor
    width: float = math.inf

    def gradients(self, x: Tensor) -> Tensor:
        away = x[:, None] - self.c
        return away / torch.sqrt(1 + away.square().sum(-1, keepdim=True) / self.width**2)

    def repeated(self, times: int) -> PseudoHuber:
        return PseudoHuber(self.c.repeat_interleave(times, 0), self.x0.repeat_interleave(times, 0), self.width)

    def gap(self) -> float:
        """Return f(x⁰) ≥ f(x⁰) − f_inf of the first instance, for a finite width."""
        away = (self.x0[0] - self.c[0]).square().sum(-1) / self.width**2
        return float((self.width**2 * (torch.sqrt(1 + away) - 1)).mean())


def memories_at_distance(grads: Tensor, R: Tensor | float, seed: int) -> Tensor:
    """Return initial memories at distance R from the first gradients, in random directions."""
    noise = torch.randn(grads.shape, generator=torch.Generator().manual_seed(seed), dtype=grads.dtype)
    length = R[:, None, None] if isinstance(R, Tensor) else R
    found: Tensor = grads + length * noise / torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
    return found


def gradient_norms(
    problem: Quadratics | PseudoHuber,
    method: Method,
    gamma: Tensor | float,
    rounds: int,
    state: Tensor | dict[str, Tensor],
    sigma: float = 0.0,
    seeds: int = 1,
    seed: int = 0,
    *,
    local: tuple[int, Tensor] | None = None,
    sample_rate: float = 1.0,
) -> Tensor:
    """Return ‖∇f(x^k)‖ for k = 0 … rounds − 1, [instances × seeds, rounds], the seeds of an instance adjacent.

    `state` holds the clients' memories at the start, or all of their state by name. With `local`, the number of local
    steps and their step sizes [instances], quadratics send the updates of local steps. A client takes part in a round
    with probability `sample_rate`; otherwise its state stays as it is.
    """
    states = state if isinstance(state, dict) else {MEMORY: state}
    if seeds > 1:
        problem = problem.repeated(seeds)
        states = {name: rows.repeat_interleave(seeds, 0) for name, rows in states.items()}
        local = (local[0], local[1].repeat_interleave(seeds)) if local is not None else None
    x = problem.x0.clone()
    step = gamma.repeat_interleave(seeds)[:, None] if isinstance(gamma, Tensor) else gamma
    estimate = states[MEMORY].mean(1)
    clients = states[MEMORY].shape[1]
    source = torch.Generator().manual_seed(seed)
    found = torch.empty(len(x), rounds, dtype=torch.float64)
    for k in range(rounds):
        grads = problem.gradients(x)
        found[:, k] = grads.mean(1).norm(dim=-1)
        if local is not None:
            if not isinstance(problem, Quadratics):
                raise TypeError("local steps are for quadratics")
            grads = problem.updates(x, *local)
        message, after = method.client_step(grads, states if isinstance(state, dict) else states[MEMORY])
        moved = after if isinstance(after, dict) else {MEMORY: after}
        if sample_rate < 1:
            drawn = torch.rand(grads.shape[:2], generator=source, dtype=grads.dtype)[..., None] < sample_rate
            message = message * drawn
            moved = {name: torch.where(drawn, rows, states[name]) for name, rows in moved.items()}
        states = moved
        mean = message.mean(1)
        if sigma:  # the mean of n draws with σ per coordinate
            mean = mean + sigma / clients**0.5 * torch.randn(mean.shape, generator=source, dtype=mean.dtype)
        direction, estimate = method.server_step(mean, estimate)
        x = x - step * direction
    return found
