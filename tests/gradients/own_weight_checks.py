"""Layers of clients with weights of their own, by kernels, against vmap alone in float64; run by `kernel_checks`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import LocalSteps, Problem, models
from normec.gradients import own_weights
from normec.gradients.choice import choose_engine
from normec.gradients.own_vmap_rules import RefuseOwnVmapRules
from normec.gradients.precision import products
from normec.gradients.shared.slots import NoRule
from normec.sampling.batches import Batches

CLIENTS, RECORDS, CLASSES = 3, 2, 4


class Layers(nn.Sequential):
    """Every layer that has a kernel; the second convolution is the given one, of 16 channels."""

    def __init__(self, channels: int, conv: nn.Conv2d) -> None:
        super().__init__(
            nn.Conv2d(channels, 16, 1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            conv,
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * conv.out_channels, CLASSES),
        )


def convolutions() -> list[tuple[int, nn.Conv2d]]:
    torch.manual_seed(0)
    return [
        (1, nn.Conv2d(16, 5, 3, padding=1)),
        (3, nn.Conv2d(16, 4, 5, 2, 1, bias=False)),
        (2, nn.Conv2d(16, 3, 3, 2, dilation=2)),
        (4, nn.Conv2d(16, 17, (3, 1), (1, 2), (2, 0))),
        (16, nn.Conv2d(16, 32, 3, padding=1)),
        (1, nn.Conv2d(16, 70, 3, padding=2)),
    ]


def gradients(model: nn.Module, x: Tensor, inputs: Tensor, targets: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
    """Gradients ``[clients, d]`` and losses at the clients' parameters, rows of a table."""
    sizes = {name: one.shape for name, one in model.named_parameters()}

    def loss(point: Tensor, item: Tensor, target: Tensor) -> Tensor:
        parts = point.split([size.numel() for size in sizes.values()])
        held = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, held, (item,)).float().to(point.dtype), target)

    with RefuseOwnVmapRules(NoRule, own_weights.RULES), own_weights.OwnWeights() if kernels else nullcontext():
        grads, losses = vmap(grad_and_value(loss))(x, inputs, targets)
    return grads, losses


def check_own_weights(device: str) -> None:
    """Gradients of all layers in float32, and in bfloat16 where it multiplies matrices."""
    for channels, conv in convolutions():
        torch.manual_seed(1)
        model = Layers(channels, conv)
        count = sum(one.numel() for one in model.parameters())
        x = 0.3 * torch.randn(CLIENTS, count)
        inputs, targets = torch.randn(CLIENTS, RECORDS, channels, 17, 18), torch.randint(CLASSES, (CLIENTS, RECORDS))
        expected, losses = gradients(model, x.double(), inputs.double(), targets, kernels=False)
        given = x.to(device), inputs.to(device), targets.to(device)
        with products("float32"), mock.patch.object(own_weights._Pool, "apply", wraps=own_weights._Pool.apply) as pools:
            found, own_losses = gradients(model, *given, kernels=True)
        assert pools.call_count == 2
        away = (found.cpu() - expected).norm(dim=1) / expected.norm(dim=1)
        assert away.median() < 1e-5, conv  # rounding may decide which of two pixels is the largest
        assert (own_losses.cpu() - losses).abs().max() < 1e-5, conv
        if device != "cpu":
            with torch.autocast(device, torch.bfloat16):
                found, own_losses = gradients(model, *given, kernels=True)
            assert (own_losses.cpu() - losses).abs().max() < 0.1, conv
            assert (found.cpu() - expected).norm(dim=1).div(expected.norm(dim=1)).median() < 0.3, conv


def check_local_steps(device: str) -> None:
    """Updates by local steps of small CNNs in float32 are those of the plain loop."""
    for name, shape in (("cnn", (1, 12, 12)), ("cnn-gn", (3, 8, 8))):
        torch.manual_seed(0)
        made = models.build(name, shape, CLASSES)
        sets = [TensorDataset(torch.randn(6, *shape), torch.randint(CLASSES, (6,))) for _ in range(CLIENTS)]
        of = Problem(made.model, made.loss, sets).to(torch.device(device), torch.float32)
        assert of.sizes is not None
        found = []
        with products("float32"), mock.patch.object(own_weights, "_suit", wraps=own_weights._suit) as asked:
            for engine in ("loop", "batched"):
                local = LocalSteps(steps=3, lr=0.05)
                made_engine = choose_engine(engine, of, Batches(of.sizes, 4, 0), 0, precision="float32", local=local)
                blocks = [*made_engine.blocks(of.x0, of.initial_buffers(), 1)]
                assert made_engine.name == engine
                found.append(torch.cat([block.grads for block in blocks]))
        assert asked.called
        assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm(), name


CHECKS: tuple[Callable[[str], None], ...] = (check_own_weights, check_local_steps)
