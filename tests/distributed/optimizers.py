"""The methods as optimizers and as the round loop runs them, their common settings, and a step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normec import DPSGD, EF21, GD, Clip, Clip21, Method, NormEC, RandK, SmoothedNorm, TopK
from normec import distributed as cluster
from normec.distributed import ClientOptimizer

RANKS, HOSTED, ROUNDS, LR, SEED = 2, 2, 10, 0.3, 5
WEIGHTS = (0.4, 0.3, 0.2, 0.1)  # of the clients of "normec-weighted"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3)).double()


METHODS: dict[str, Callable[..., ClientOptimizer]] = {
    "normec": lambda net, **how: cluster.NormEC(net.parameters(), LR, 0.1, 0.3, **how),
    "normec-plain": lambda net, **how: cluster.NormEC(net.parameters(), LR, 0.1, 0.3, server_norm=False, **how),
    "normec-forgetting": lambda net, **how: cluster.NormEC(net.parameters(), LR, 0.1, 0.3, decay=0.1, **how),
    "normec-weighted": lambda net, **how: cluster.NormEC(net.parameters(), LR, 0.1, 0.3, weights=WEIGHTS, **how),
    "clip21": lambda net, **how: cluster.Clip21(net.parameters(), LR, 0.5, **how),
    "ef21-topk": lambda net, **how: cluster.EF21(net.parameters(), LR, TopK(3), **how),
    "ef21-randk": lambda net, **how: cluster.EF21(net.parameters(), LR, RandK(3), **how),
    "dpsgd-norm": lambda net, **how: cluster.DPSGD(net.parameters(), LR, SmoothedNorm(0.1), 0.5, **how),
    "dpsgd-clip": lambda net, **how: cluster.DPSGD(net.parameters(), LR, Clip(0.5), **how),
    "dpsgd-momentum": lambda net, **how: cluster.DPSGD(net.parameters(), LR, Clip(0.5), momentum=0.8, **how),
    "gd": lambda net, **how: cluster.GD(net.parameters(), LR, **how),
    "clip21-adam": lambda net, **how: cluster.Clip21(net.parameters(), LR, 0.5, server_optimizer="adam", **how),
}
OPTIMIZERS = {"clip21-adam": "adam"}  # the server optimizers of those that have one
# The states of these are ĝ with memories, ĝ without memories, and those of Adam.
RESUMED = ("normec", "dpsgd-momentum", "clip21-adam")
DEFINITIONS: dict[str, Method] = {
    "normec": NormEC(0.1, 0.3),
    "normec-plain": NormEC(0.1, 0.3, server_norm=False),
    "normec-forgetting": NormEC(0.1, 0.3, decay=0.1),
    "normec-weighted": NormEC(0.1, 0.3),
    "clip21": Clip21(0.5),
    "ef21-topk": EF21(TopK(3)),
    "ef21-randk": EF21(RandK(3)),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1), 0.5),
    "dpsgd-clip": DPSGD(Clip(0.5)),
    "dpsgd-momentum": DPSGD(Clip(0.5), momentum=0.8),
    "gd": GD(),
    "clip21-adam": Clip21(0.5),
}


def released(x: nn.Parameter, optimizer: ClientOptimizer, gradient: float = 0.0) -> Tensor:
    """What one step shows an observer, who knows x before and after it."""
    before = x.detach().clone()
    x.grad = torch.full_like(x, gradient)
    optimizer.step()
    return before - x.detach()
