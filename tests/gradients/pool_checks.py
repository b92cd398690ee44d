"""The kernels that pool, alone and after GroupNorm and ReLU, against PyTorch; run by `kernel_checks`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem, models
from normec.gradients.precision import products
from normec.gradients.shared.rules import ModuleModel
from normec.models.fused_norms import norm_relu_pool

from ..support.covering import combined
from .nearness import LAST, by_autograd, framed, near, nodes, untouched

PRECISIONS = (torch.float32, torch.bfloat16)


def check_max_pool(device: str) -> None:
    """The largest of 2×2 pixels, odd borders, ties and NaN included."""
    from normec.kernels.pooling import pool, unpool

    for dtype, shape in product(PRECISIONS, ((2, 16, 6, 4), (3, 5, 5, 7), (1, 1, 2, 2), (2, 3, 9, 2))):
        torch.manual_seed(0)
        x = torch.randint(3, shape, device=device).to(dtype)  # many are equal
        x[0, 0, 0, 1] = torch.nan
        x = x.contiguous(memory_format=LAST).requires_grad_()
        expected = F.max_pool2d(x, 2)
        g = torch.randn_like(expected).contiguous(memory_format=LAST)
        y, indices = pool(x.detach())
        assert torch.equal(y.nan_to_num(9), expected.nan_to_num(9)), shape
        (slope,) = torch.autograd.grad(expected, x, g)
        assert torch.equal(unpool(g, indices, shape), slope), shape


def check_adaptive_max_pool(device: str) -> None:
    """Windows that overlap and that do not, ties and NaN included; slopes of several windows add up."""
    from normec.kernels.pooling import adapt, adapt_back

    sizes = ((14, 14, 5, 5), (7, 9, 3, 2), (5, 5, 5, 5), (6, 4, 3, 2), (8, 3, 1, 2))
    for dtype, channels, (height, width, down, across) in combined(device, PRECISIONS, (1, 6, 32), sizes):
        torch.manual_seed(0)
        x = torch.randint(9, (3, channels, height, width), device=device).to(dtype)
        x[0, 0, 1, 1] = torch.nan
        x = x.contiguous(memory_format=LAST)
        y, indices = adapt(x, down, across)
        own = x.double().cpu().requires_grad_()
        expected = F.adaptive_max_pool2d(own, (down, across))
        assert torch.equal(y.double().cpu().nan_to_num(9), expected.nan_to_num(9)), (height, width, down, across)
        g = torch.randint(-8, 9, y.shape, device=device).to(dtype).contiguous(memory_format=LAST)  # sums are exact
        (slope,) = torch.autograd.grad(expected, own, g.double().cpu())
        assert torch.equal(adapt_back(g, indices, tuple(x.shape)).double().cpu(), slope), (height, width, down, across)


def check_group_norm_pool(device: str) -> None:
    """As GroupNorm with ReLU and then pooling, each by its own kernel: ties, NaN and cut-off images included."""
    from normec.kernels import group_norm, group_norm_pool, pooling

    assert not group_norm_pool.fits((2, 16, 3, 4))
    assert not group_norm_pool.fits((2, 512, 8, 8))
    shapes = ((3, 8, 4, 4, 6), (2, 16, 8, 8, 8), (2, 4, 1, 10, 2), (1, 64, 8, 2, 2))
    for dtype, (count, channels, groups, height, width), affine in combined(device, PRECISIONS, shapes, (True, False)):
        torch.manual_seed(0)
        what = (dtype, count, channels, groups, height, width, affine)
        shape = (count, channels, height, width)
        assert group_norm_pool.fits(shape)
        x = (torch.randint(5, shape, device=device) / 2 + 3).to(dtype).contiguous(memory_format=LAST)  # many are equal
        if count == 3:
            x[0, 0, 0, 1] = torch.nan
        weight, bias = (torch.rand(2, channels, device=device) - 0.3) if affine else (None, None)
        if count == 2 and bias is not None:  # numbers that are equal only as they are written
            x, bias = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAST), bias + 50
        y, mean, inverse = group_norm_pool.forward(x, groups, weight, bias, 1e-4)
        whole, own_mean, own_inverse = group_norm.forward(x, groups, weight, bias, 1e-4, True)
        near(mean.nan_to_num(), own_mean.double().nan_to_num(), 1e-6, ("mean", *what))
        near(inverse.nan_to_num(), own_inverse.double().nan_to_num(), 1e-6, ("inverse", *what))
        pooled, indices = pooling.pool(whole)
        near(y.nan_to_num(7), pooled.double().nan_to_num(7), _close(dtype), ("forward", *what))
        g = torch.randn_like(y).contiguous(memory_format=LAST)
        dx, sums = group_norm_pool.backward(g, x, groups, weight, bias, own_mean, own_inverse)
        slope = pooling.unpool(g, indices, shape)
        expected, own_sums, _ = group_norm.backward(slope, x, groups, weight, bias, own_mean, own_inverse, True)
        near(dx.nan_to_num(7), expected.double().nan_to_num(7), _close(dtype), ("data", *what))
        near(sums.nan_to_num(7), own_sums.double().nan_to_num(7), 1e-5, ("scales", *what))


def _close(dtype: torch.dtype) -> float:
    """The tolerance: sums in another order may round otherwise once."""
    return 1e-6 if dtype == torch.float32 else 4e-3


def check_sums_of_clients(device: str) -> None:
    """Images' gradients of a norm's scales, a client's added up into its row."""
    from normec.kernels.group_norm import by_client

    for clients, images, channels in ((3, 5, 4), (1, 70, 16), (4, 1, 64), (2, 129, 32)):
        sums = torch.randn(clients * images, 2, channels, device=device)
        (wide, by_weight), by_bias = framed(clients, channels, device=device), torch.zeros(clients, channels + 1)
        by_bias = by_bias.to(device)[:, :-1]  # rows another distance apart
        by_client(sums, by_weight, by_bias)
        untouched(wide)
        expected = sums.double().view(clients, images, 2, channels).sum(1)
        near(by_weight, expected[:, 0], 1e-6, (clients, images, channels))
        near(by_bias, expected[:, 1], 1e-6, (clients, images, channels))


class Pair(nn.Module):
    """Two norms with pooling whose parameters `how` joins or freezes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Linear(8, 4)
        self.one, self.two = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)
        for norm in (self.one, self.two):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        if how == "one norm twice":
            self.two = self.one
        elif how == "shared":
            self.two.weight, self.two.bias = self.one.bias, self.one.weight
        elif how.startswith("frozen"):
            getattr(self.one, how.split()[1]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = norm_relu_pool(self.one, self.pool, self.conv(x))
        return self.head(norm_relu_pool(self.two, self.pool, x).mean((2, 3)))


def check_scales_used_twice_or_frozen(device: str) -> None:
    """A parameter of several uses gets the sum of its gradients, whichever norm it serves."""
    for how in ("apart", "one norm twice", "shared", "frozen weight", "frozen bias"):
        torch.manual_seed(0)
        of, grads, x, labels = _passed(Pair(how), (3, 16, 8), device)
        by_autograd(of, grads, x, labels, how)


def _passed(model: nn.Module, shape: tuple[int, ...], device: str) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """A problem of two clients, their gradients in one pass, and their records."""
    clients, records, labels = 2, 3, torch.arange(6) % 4
    x = torch.randn(clients * records, *shape)
    parts = [TensorDataset(*pair) for pair in zip(x.chunk(clients), labels.chunk(clients), strict=True)]
    of = Problem(model, F.cross_entropy, parts).to(torch.device(device), torch.float32)
    made = ModuleModel(of)
    shared, sink = made.model, made.sink
    grads = torch.full((clients, len(of.x0)), torch.nan, device=device)
    sink.fill(of.x0, grads, of.initial_buffers())
    with products("float32"):
        outputs = shared.train()(x.to(device))
        names = {type(node).__name__ for node in nodes(outputs.grad_fn)}
        assert not any("MaxPool2D" in one for one in names), names
        assert isinstance(model, models.SmallCNN) or not any(
            "Relu" in one or "GroupNormRowsBackward" in one for one in names
        ), names
        (F.cross_entropy(outputs, labels.to(device), reduction="none").sum() / records).backward()  # type: ignore[no-untyped-call]
    sink.finish()
    return of, grads, x, labels


def check_pooling_in_a_model(device: str) -> None:
    """Both small networks in one pass for all clients, the kernels at work, against autograd client by client."""
    for name, shape in (("cnn", (1, 12, 14)), ("cnn-gn", (3, 8, 16))):
        torch.manual_seed(0)
        of, grads, x, labels = _passed(models.build(name, shape, 4).model, shape, device)
        by_autograd(of, grads, x, labels, name)


def check_layers_with_hooks_are_pooled_step_by_step(device: str) -> None:
    """A hook on either layer, or another kind of pooling: step by step."""
    from normec.kernels import group_norm_pool

    class Two(nn.Module):
        def __init__(self, pool: nn.Module) -> None:
            super().__init__()
            self.norm, self.pool = nn.GroupNorm(2, 4), pool

        def forward(self, x: Tensor) -> Tensor:
            return norm_relu_pool(self.norm, self.pool, x).mean((2, 3))

    class Other(nn.MaxPool2d):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(-x)

    def used(model: Two, seen: list[Tensor] | None = None) -> bool:
        x, labels = torch.randn(4, 4, 6, 4), torch.arange(4)
        of = Problem(model, F.cross_entropy, [TensorDataset(x, labels)]).to(torch.device(device), torch.float32)
        made = ModuleModel(of)
        shared, sink = made.model, made.sink
        sink.fill(of.x0, torch.zeros(1, len(of.x0), device=device), of.initial_buffers())
        if seen is not None:
            seen.clear()  # of what the problem tried on the model
        with mock.patch.object(group_norm_pool, "forward", wraps=group_norm_pool.forward) as called:
            found = shared(x.to(device))
        sink.clear()
        near(found.detach().cpu(), of.model.cpu()(x).detach().double(), 1e-5, model)
        return called.call_count > 0

    assert used(Two(nn.MaxPool2d(2)))
    for pool in (nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.AvgPool2d(2), Other(2)):
        assert not used(Two(pool))
    for name in ("norm", "pool"):
        model = Two(nn.MaxPool2d(2))
        seen: list[Tensor] = []
        getattr(model, name).register_forward_hook(lambda *call, seen=seen: seen.append(call[2].detach()))
        assert not used(model, seen)
        assert len(seen) == 2  # and of the plain model


CHECKS: tuple[Callable[[str], None], ...] = (
    check_max_pool,
    check_adaptive_max_pool,
    check_group_norm_pool,
    check_sums_of_clients,
    check_pooling_in_a_model,
    check_scales_used_twice_or_frozen,
    check_layers_with_hooks_are_pooled_step_by_step,
)
