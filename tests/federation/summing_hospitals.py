"""Four hospitals of different sizes whose messages are added up by secure sums, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from normec import Method, Privacy, Problem
from normec.federation.protocol.gradient_oracle import GradientOracle, ProblemOracle
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.sum_coordinator import SumCoordinator
from normec.federation.protocol.sum_party import SumParty
from normec.federation.protocol.wire import SumRequest, to_fields
from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.roster import Member, Roster
from normec.privacy.noise import SecureNoise

from .hospitals import FEATURES, Vector, loss, model
from .in_process import plan

SIZES = (9, 14, 25, 12)
NODES = ("a", "b", "c", "d")
OPEN = Policy(
    epsilon=1e6,
    units=["client", "record"],
    least_sigma=1e-3,
    methods=["normec", "clip21", "dpsgd", "ef21", "gd"],
    trusts=["secure-sum"],
    allow_without_noise=True,
    accept_loss=False,
)
Answers = Callable[[str, str], bool]  # party and stage: whether its answer arrives


class RepeatableNoise(SecureNoise):
    """Integers of the right distribution from a seeded generator, for trajectories that a test computes too."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def integers(self, count: int, scale: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.rint(self._draw.normal(size=count) * scale).astype(np.int64)


def patients(index: int) -> tuple[Vector, Vector]:
    rng = np.random.default_rng(200 + index)
    inputs = rng.normal(size=(SIZES[index], FEATURES)) * (index + 1) / 2
    return inputs, (inputs[:, 0] + rng.normal(size=SIZES[index]) > 0).astype(np.float64)


def problem(*indices: int) -> Problem:
    sets = [TensorDataset(*map(torch.from_numpy, patients(index))) for index in indices or range(len(SIZES))]
    return Problem(model(), loss, sets)


class SummingHospitals:
    """The server and the parties with their folders. `party` is a running process until `restart` replaces it."""

    def __init__(
        self,
        folder: Path,
        method: Method,
        rounds: int,
        privacy: Privacy | None = None,
        policy: Policy = OPEN,
        oracles: Mapping[str, GradientOracle] | None = None,
        plan_changes: Mapping[str, Any] | None = None,
        **coordinator: Any,
    ) -> None:
        self.folder, self.method = folder, method
        keys = {node: Identity.generate() for node in NODES}
        self.roster = Roster(tuple(Member(f"hospital-{node}", keys[node].public) for node in NODES))
        self.oracles = {node: ProblemOracle(problem(i)) for i, node in enumerate(NODES)} | dict(oracles or {})
        self.policies: dict[str, Policy] = {}
        for node, key in keys.items():
            home = self.home(node)
            home.mkdir(parents=True)
            key.save(home / "identity.pem")
            self.roster.save(home / "roster.toml")
            paths = {"identity": str(home / "identity.pem"), "roster": str(home / "roster.toml")}
            self.policies[node] = policy.model_copy(update=paths)
        self._given: dict[str, Any] = {
            "roster": self.roster,
            "colluding": 1,
            "minimum": 3,
            "run": "trial",
            "privacy": privacy,
            "folder": folder / "server",
            **coordinator,
        }
        self.plan = plan(rounds, **{"lr": 0.3, "seed": 7, **(plan_changes or {})})
        self.parties: dict[str, SumParty] = {}
        self.server = self._opened()
        for node in NODES:
            self.restart(node)

    def _opened(self) -> SumCoordinator:
        return SumCoordinator(self.method, problem(0).x0, NODES, self.plan, **self._given)

    def restart_server(self) -> None:
        self.server.close()
        self.server = self._opened()

    def restart(self, node: str) -> None:
        """Replace a party's process by a new one with the same folder."""
        if node in self.parties:
            self.parties[node].close()
        noise = RepeatableNoise(NODES.index(node))
        self.parties[node] = SumParty(self.home(node), self.policies[node], self.oracles[node], noise)

    def home(self, node: str) -> Path:
        return self.folder / "parties" / node

    def policy(self, node: str, **changes: Any) -> None:
        self.policies[node] = self.policies[node].model_copy(update=changes)
        self.parties[node].policy = self.policies[node]

    def ask(self, node: str, request: SumRequest) -> str:
        return self.server.receive(node, to_fields(self.parties[node].answer(to_fields(request))))

    def exchange(self, arrives: Answers = lambda *_: True) -> None:
        """Everybody whose answer arrives answers; then the exchange closes."""
        stage = self.server.stage
        for node, request in self.server.requests().items():
            if arrives(node, stage):
                self.ask(node, request)
        self.server.close_exchange()

    def round(self, arrives: Answers = lambda *_: True, exchanges: int = 50) -> None:
        k = self.server.round
        for _ in range(exchanges):
            if self.server.round != k or self.server.finished:
                return
            self.exchange(arrives)
        raise AssertionError(f"round {k} is not over after {exchanges} exchanges")

    def run(self) -> Tensor:
        while not self.server.finished:
            self.round()
        return self.server.finish().x

    def close(self) -> None:
        self.server.close()
        for party in self.parties.values():
            party.close()


def without(node: str, stage: str) -> Answers:
    return lambda other, at: (other, at) != (node, stage)


def gradient(index: int, x: Vector, clip: bool = False, divisor: float | None = None) -> Vector:
    """The mean gradient of a hospital's patients; with `clip`, of g/(‖g‖ + 0.01) over the public number."""
    total = np.zeros(FEATURES + 1)
    for inputs, target in zip(*patients(index), strict=True):
        probability = 1 / (1 + math.exp(-float(inputs @ x[:FEATURES] + x[FEATURES])))
        one = (probability - target) * np.append(inputs, 1.0)
        total += one / (math.sqrt(float(one @ one)) + 0.01) if clip else one
    return total / (divisor or SIZES[index])


@dataclass
class ByHand:
    """m_i = Ψ(G_i − g_i);  S = γ Σ (⌊ω_i m_i / γ⌋ towards zero + rounded noise);  ĝ ← ĝ + β S/n;  x ← x − 0.3 ĝ.

    g_i ← g_i + β m_i for the parties in the sum. Without a memory, Ψ(G_i) is sent, and x moves by S/n.
    """

    psi: Callable[[Vector], Vector]
    step: float
    sigma: float = 0.0
    beta: float = 1.0
    memory: bool = False
    weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    gradient: Callable[[int, Vector], Vector] = gradient

    def run(self, present: Sequence[Sequence[int]], made: Sequence[Sequence[int]] | None = None) -> Vector:
        """x after rounds with these parties in the sum; `made` are those that drew noise, if they are others."""
        x = problem(0).x0.numpy().copy()
        held, estimate = np.zeros((4, len(x))), np.zeros(len(x))
        noise = [np.random.default_rng(i) for i in range(4)]
        for parties, drawing in zip(present, made or present, strict=True):
            total = np.zeros(len(x))
            for i in drawing:
                message = self.psi(self.gradient(i, x) - held[i])
                drawn = np.rint(noise[i].normal(size=len(x)) * (self.sigma / self.step)) if self.sigma else 0.0
                if i in parties:
                    total += np.trunc(message * self.weights[i] / self.step) + drawn
                    held[i] = held[i] + self.beta * message if self.memory else held[i]
            mean = total * self.step / 4
            estimate = estimate + self.beta * mean if self.memory else mean
            x = x - 0.3 * estimate
        return x


def clipped(size: float) -> Callable[[Vector], Vector]:
    return lambda v: v * min(1.0, size / max(math.sqrt(float(v @ v)), 1e-300))
