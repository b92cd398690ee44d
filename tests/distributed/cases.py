"""Runs that must come out the same however their clients are spread over ranks: seven, so that shares differ."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import normec
from normec import (
    DPSGD,
    EF21,
    EF21SGDM,
    GD,
    AdaptiveClip,
    Clip,
    Clip21,
    Clip21SGD2M,
    Compute,
    ErrorFeedback,
    FixedSize,
    LocalSteps,
    Logging,
    Memory,
    Method,
    MomentumNormEC,
    NormEC,
    Privacy,
    Problem,
    RandK,
    Rotation,
    Run,
    Scaffold,
    ServerOptimizer,
    TopK,
)
from normec.algorithms.operators import SmoothedNorm
from normec.training.communicator import Communicator

from ..support import own_methods
from ..support.runs import data

CLIENTS = 7
WEIGHTS = tuple(i / 28 for i in range(1, 8))


def problem(kind: str) -> Problem:
    torch.manual_seed(0)
    model = {
        "linear": lambda: nn.Linear(4, 3),
        "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        "batchnorm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
    }[kind]()
    return Problem(model, F.cross_entropy, [data(9 + 2 * i, i) for i in range(CLIENTS)], data(15, 9))


@dataclass(frozen=True)
class Case:
    method: Method
    problem: str = "linear"
    how: dict[str, Any] = field(default_factory=dict)
    engine: str = "auto"

    def train(self, communicator: Communicator | None = None, **more: Any) -> Run:
        how = {
            "lr": 0.3,
            "rounds": 6,
            "seed": 5,
            "logging": Logging(every=3, diagnostics=True),
            "compute": Compute(dtype=torch.float64, engine=self.engine, communicator=communicator),
            **self.how,
            **more,
        }
        return normec.train(problem(self.problem), self.method, **how)


SEEDED = Privacy(epsilon=4, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum")
CASES = {
    "normec": Case(NormEC(0.1, 0.3)),
    "normec without server normalisation": Case(NormEC(0.1, 0.3, server_norm=False), "mlp"),
    "normec with forgetting, sampled": Case(NormEC(0.1, 0.3, decay=0.1), how={"participation": FixedSize(3)}),
    "normec, one client at a time": Case(NormEC(0.1, 0.3), how={"participation": FixedSize(1)}),
    "normec from gradients": Case(NormEC(0.1, 0.3), how={"memory": Memory(initial="gradient"), "batch_size": 4}),
    "normec on batches, all recorded": Case(
        NormEC(0.1, 0.3), "mlp", {"batch_size": 4, "logging": Logging(every=3, full_gradient=True)}
    ),
    "normec by the loop": Case(NormEC(0.1, 0.3), "mlp", engine="loop"),
    "weighted by records": Case(NormEC(0.1, 0.3), how={"weights": "records"}),
    "weighted, from gradients, sampled": Case(
        Clip21(0.5), how={"weights": WEIGHTS, "memory": Memory(initial="gradient"), "participation": FixedSize(3)}
    ),
    "weighted, private, sums": Case(NormEC(0.1, 0.3), how={"weights": WEIGHTS, "privacy": SEEDED}),
    "clip21": Case(Clip21(0.5)),
    "ef21 top-k": Case(EF21(TopK(3))),
    "ef21 rand-k": Case(EF21(RandK(3)), "mlp"),
    "dpsgd norm": Case(DPSGD(SmoothedNorm(0.1), 0.5)),
    "dpsgd with momentum, sampled": Case(DPSGD(Clip(0.5), momentum=0.8), how={"participation": FixedSize(3)}),
    "dpsgd clip": Case(DPSGD(Clip(0.5)), "mlp"),
    "gd": Case(GD(), "mlp"),
    "client momentum, sampled, weighted": Case(
        MomentumNormEC(0.1, 0.3, 0.6), "mlp", {"participation": FixedSize(3), "weights": WEIGHTS, "batch_size": 4}
    ),
    "clip21-sgd2m, private": Case(Clip21SGD2M(0.5, 0.7, 0.6), how={"privacy": SEEDED}),
    "ef21-sgdm, sampled": Case(EF21SGDM(TopK(3), 0.6), "mlp", {"participation": FixedSize(3), "batch_size": 4}),
    "adaptive clipping, private": Case(AdaptiveClip(Clip21(0.5)), how={"privacy": SEEDED}),
    "dpsgd-adaptive, private, weighted": Case(
        AdaptiveClip(DPSGD(Clip(0.5), momentum=0.5)), how={"privacy": SEEDED, "weights": WEIGHTS}
    ),
    "dpsgd-adaptive, sampled": Case(
        AdaptiveClip(DPSGD(Clip(0.5)), participation=3 / 7), "mlp", {"participation": FixedSize(3)}
    ),
    "scaffold, sampled": Case(
        Scaffold(0.5), "mlp", {"local": LocalSteps(steps=3, lr=0.1), "participation": FixedSize(3)}
    ),
    "batchnorm": Case(NormEC(0.1, 0.3), "batchnorm", {"batch_size": 4}),
    **{
        f"own, {name}": Case(method, "mlp", {"participation": FixedSize(3)}) for name, method in own_methods.ALL.items()
    },
    **{f"own, {name}, private": Case(method, how={"privacy": SEEDED}) for name, method in own_methods.ALL.items()},
    "private, sums": Case(NormEC(0.1, 0.3), how={"privacy": SEEDED}),
    "private, sums of sparse messages": Case(ErrorFeedback(Clip(0.5)), how={"privacy": SEEDED}),
    "adam on a schedule, averaged": Case(
        NormEC(0.1, 0.3),
        "mlp",
        {"lr": 0.02, "server_optimizer": "adam", "lr_schedule": "cosine", "averaging": "polyak"},
    ),
    "adambc, private": Case(
        Clip21(0.5, decay=0.1),
        how={"privacy": SEEDED, "lr": 0.02, "server_optimizer": ServerOptimizer("adambc", floor=0.01)},
    ),
    "private, turns with correlated noise": Case(
        NormEC(0.1, 0.3, server_norm=False, decay=0.1),
        how={
            "privacy": Privacy(epsilon=4, trust="central", noise_bands="best"),
            "participation": Rotation(groups=3),
        },
    ),
    "private, each alone": Case(
        NormEC(0.1, 0.3),
        how={"privacy": Privacy(epsilon=8, delta=1e-5, unit="client", relation="zero-out", trust="local")},
    ),
    "local steps": Case(NormEC(0.1, 0.3), "mlp", {"local": LocalSteps(steps=3, lr=0.1), "batch_size": 4}),
    "local epochs, sampled": Case(
        DPSGD(Clip(0.5)),
        how={
            "local": LocalSteps(epochs=2, lr=0.1, prox=0.2, scale="difference"),
            "batch_size": 4,
            "participation": FixedSize(3),
        },
    ),
    "private, with a noise schedule": Case(
        NormEC(0.1, 0.3, server_norm=False), how={"privacy": dataclasses.replace(SEEDED, noise_schedule="best")}
    ),
    "private, sampled": Case(
        DPSGD(Clip(0.5)),
        how={
            "privacy": Privacy(
                epsilon=4, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", sampling=0.4
            )
        },
    ),
}


def cases_of(ranks: int) -> list[str]:
    """The names of the cases that a job of so many ranks trains.

    Two ranks train all. A rank alone trains as a process without torchrun, and a third rank only changes the shares of
    clients, which matter most where some take part: every second case, and those whose clients are sampled.
    """
    names = list(CASES)
    if ranks == 2:
        return names
    return [name for i, name in enumerate(names) if not i % (10 if ranks == 1 else 2) or (ranks > 2 and _samples(name))]


def _samples(name: str) -> bool:
    return "participation" in CASES[name].how
