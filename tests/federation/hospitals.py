"""Three hospitals of different sizes with a logistic regression, and the same federation written out in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import Method, Privacy, Problem
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.gradient_oracle import GradientOracle, ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Reply, Request, to_fields
from normec.privacy.noise import SeededNoise
from normec.training.run import Plan

from .in_process import plan

SIZES = (9, 14, 25)
NODES = ("a", "b", "c")
FEATURES = 3
SEED = 7
Vector = np.ndarray[Any, np.dtype[np.float64]]
POLICY = Policy(
    epsilon=1e6,
    unit="record",
    least_sigma=1e-3,
    simulation=True,
    methods=["normec", "clip21", "dpsgd"],
)


def patients(index: int) -> tuple[Vector, Vector]:
    """The records of a hospital: features, and whether the disease is present."""
    rng = np.random.default_rng(100 + index)
    inputs = rng.normal(size=(SIZES[index], FEATURES)) * (index + 1)
    return inputs, (inputs[:, 0] + rng.normal(size=SIZES[index]) > 0).astype(np.float64)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def dataset(index: int) -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, patients(index)))


def problem(*indices: int) -> Problem:
    return Problem(model(), loss, [dataset(index) for index in indices or range(len(SIZES))])


def start() -> Tensor:
    return problem(0).x0


class Hospitals:
    """The server and the three parties with their folders, in one process."""

    def __init__(
        self,
        folder: Path,
        method: Method,
        rounds: int,
        privacy: Privacy | None,
        policy: Policy = POLICY,
        oracles: Sequence[GradientOracle] | None = None,
        plan_changes: Mapping[str, Any] | None = None,
        **coordinator: Any,
    ) -> None:
        self.folder, self.policy = folder, policy
        self.oracles = oracles or [ProblemOracle(problem(index)) for index in range(len(SIZES))]
        self.plan: Plan = plan(rounds, lr=0.3, seed=SEED, **(plan_changes or {}))
        self._given: dict[str, Any] = {"privacy": privacy, "run": "trial", **coordinator}
        self._given["folder"] = folder / "servers" / self._given["run"]
        self._method = method
        self.server = self._opened()

    def _opened(self) -> Coordinator:
        return Coordinator(self._method, start(), NODES, self.plan, **self._given)

    def restart_server(self) -> None:
        self.server.close()
        self.server = self._opened()

    def home(self, node: str) -> Path:
        return self.folder / node

    def party(self, node: str) -> Party:
        """The party as a new process opens it."""
        return Party(self.home(node), self.policy, self.oracles[NODES.index(node)], node=node)

    def ask(self, node: str, request: Request) -> None:
        self.server.receive(node, to_fields(self.party(node).answer(to_fields(request))))

    def round(self) -> dict[str, Reply]:
        """Everybody answers, and the round closes; returns the messages."""
        while requests := self.server.requests():
            for node, request in requests.items():
                self.ask(node, request)
        taken = dict(self.server.collector.taken)
        self.server.close_round()
        return taken

    def run(self) -> Tensor:
        while not self.server.finished:
            self.round()
        return self.server.finish().x


def scaled(v: Vector, clip: float | str) -> Vector:
    """One record's share by itself: clipped to the norm, or AUTO-S."""
    length = math.sqrt(float(v @ v))
    if clip == "auto":
        return v / (length + 0.01)
    return v if length <= float(clip) else v * (float(clip) / length)


def share(v: Vector, clip: float | str, by_layer: bool) -> Vector:
    """The weights and the bias of the model are its two layers, each bounded by 1/√2 of the clip."""
    if not by_layer:
        return scaled(v, clip)
    root = math.sqrt(2)
    return np.concatenate([scaled(part * root, clip) / root for part in (v[:FEATURES], v[FEATURES:])])


def gradient(
    index: int, x: Vector, clip: float | str, by_layer: bool, divisor: float, drawn: Sequence[bool] | None = None
) -> Vector:
    """(1/B) Σ clip(∇ℓ_r(x)), record by record."""
    total = np.zeros(FEATURES + 1)
    for number, (inputs, target) in enumerate(zip(*patients(index), strict=True)):
        if drawn is None or drawn[number]:
            probability = 1 / (1 + math.exp(-float(inputs @ x[:FEATURES] + x[FEATURES])))
            total += share((probability - target) * np.append(inputs, 1.0), clip, by_layer)
    return total / divisor


@dataclass
class ByHand:
    """m_i = Ψ(G_i − g_i) + z_i;  g_i ← (1−λ) g_i + β m_i;  ĝ ← (1−λ) ĝ + β Σ w_i m_i;  x ← x − γ ĝ (over its norm)."""

    psi: Callable[[Vector], Vector]
    beta: float = 1.0
    decay: float = 0.0
    memory: bool = True
    normed: bool = False

    def run(
        self,
        rounds: int,
        grads: Callable[[int, Vector, int], Vector],
        sigmas: Sequence[float],
        weights: Sequence[float] = (1 / 3, 1 / 3, 1 / 3),
    ) -> Vector:
        x = start().numpy().copy()
        held, estimate = np.zeros((3, len(x))), np.zeros(len(x))
        for k in range(rounds):
            mean = np.zeros(len(x))
            for i, node in enumerate(NODES):
                clean = self.psi(grads(i, x, k) - (held[i] if self.memory else 0))
                named = ("federation", "trial", node, k + 1)
                noise = SeededNoise(SEED).draw(len(x), sigmas[i], *named, dtype=torch.float64).numpy()
                sent = clean + noise
                mean += weights[i] * sent
                if self.memory:
                    held[i] = (1 - self.decay) * held[i] + self.beta * sent
            estimate = (1 - self.decay) * estimate + self.beta * mean if self.memory else mean
            length = math.sqrt(float(estimate @ estimate))
            x = x - 0.3 * (estimate / length if self.normed else estimate)
        return x
