"""Layers of clients with weights of their own, by kernels, against vmap alone in float64; run by `kernel_checks`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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
from normec.models.fused_norms import norm_relu, norm_relu_pool
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


class Norms(nn.Module):
    """Convolutions whose norms are computed together with what follows them; the last norm is hooked, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False)])
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 16), nn.GroupNorm(8, 16), nn.GroupNorm(8, 32)])
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(32, CLASSES)
        self.norms[2].register_forward_hook(lambda norm, given, made: made * 1.5)  # noqa: ARG005

    def forward(self, x: Tensor) -> Tensor:
        first = norm_relu_pool(self.norms[0], self.pool, self.convs[0](x))
        second = norm_relu(self.norms[1], self.convs[1](first), first)
        third = norm_relu(self.norms[1], self.convs[1](second))
        found: Tensor = self.head(norm_relu(self.norms[2], self.down(third)).mean((2, 3)))
        return found


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


def gradients(model: nn.Module, x: Tensor, inputs: Tensor, targets: Tensor, by_kernel: bool) -> tuple[Tensor, Tensor]:
    """Gradients ``[clients, d]`` and losses at the clients' parameters, rows of a table."""
    sizes = {name: one.shape for name, one in model.named_parameters()}

    def loss(point: Tensor, item: Tensor, target: Tensor) -> Tensor:
        parts = point.split([size.numel() for size in sizes.values()])
        held = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, held, (item,)).float().to(point.dtype), target)

    with RefuseOwnVmapRules(NoRule, own_weights.RULES), own_weights.own_weights() if by_kernel else nullcontext():
        grads, losses = vmap(grad_and_value(loss))(x, inputs, targets)
    return grads, losses


def compare(model: nn.Module, shape: tuple[int, ...], device: str, calls: dict[str, int]) -> None:
    """Gradients in float32, and in the half precision in which the device can multiply matrices.

    `calls`: how often functions of `own_weights` are called for one gradient.
    """
    count = sum(one.numel() for one in model.parameters())
    x = 0.3 * torch.randn(CLIENTS, count)
    inputs, targets = torch.randn(CLIENTS, RECORDS, *shape), torch.randint(CLASSES, (CLIENTS, RECORDS))
    expected, losses = gradients(model, x.double(), inputs.double(), targets, by_kernel=False)
    given = x.to(device), inputs.to(device), targets.to(device)
    with ExitStack() as stack:
        stack.enter_context(products("float32"))
        owners = [getattr(own_weights, name) for name in calls]
        counted = [stack.enter_context(mock.patch.object(one, "apply", wraps=one.apply)) for one in owners]
        found, own_losses = gradients(model, *given, by_kernel=True)
        assert {name: one.call_count for name, one in zip(calls, counted, strict=True)} == calls
    away = (found.cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert away.median() < 1e-5, model  # rounding may decide which of two pixels is the largest
    assert (own_losses.cpu() - losses).abs().max() < 1e-5, model
    half, close = (torch.float16, 0.05) if device == "cpu" else (torch.bfloat16, 0.3)
    with torch.autocast(device, half):
        found, own_losses = gradients(model, *given, by_kernel=True)
    assert (own_losses.cpu() - losses).abs().max() < close, model
    assert (found.cpu() - expected).norm(dim=1).div(expected.norm(dim=1)).median() < close, model


def check_own_weights(device: str) -> None:
    for channels, conv in convolutions():
        torch.manual_seed(1)
        compare(Layers(channels, conv), (channels, 17, 18), device, {"_Convolution": 2, "_GroupNorm": 1, "_Pool": 2})


def check_what_follows_a_norm(device: str) -> None:
    """Shortcuts, ReLU and pooling are computed with the norm, but not with a norm that has a hook."""
    torch.manual_seed(1)
    calls = {"_Convolution": 4, "_GroupNormPool": 1, "_GroupNorm": 3, "_GroupNormGradient": 3, "_Pool": 0}
    compare(Norms(), (3, 16, 18), device, calls)


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


CHECKS: tuple[Callable[[str], None], ...] = (
    check_own_weights,
    check_what_follows_a_norm,
    check_local_steps,
)
