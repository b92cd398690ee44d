"""The kernels of norms, alone and with a shortcut and ReLU, against autograd in float64; run by `kernel_checks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from normec import Problem, kernels
from normec.gradients.precision import products
from normec.gradients.shared import norms
from normec.gradients.shared.rules import ModuleModel
from normec.models.fused_norms import norm_relu
from normec.models.resnet import Block

from ..support.covering import combined
from .nearness import LAST, by_autograd, framed, near, nodes, untouched

PRECISIONS = ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))
KINK = 1e-2  # what ReLU lets through of a number within rounding of zero may differ
AFTER = ("nothing", "relu", "relu, two uses", "shortcut and relu", "shortcut and relu, two uses")


class Given(nn.Module):
    """A norm whose output is known, so that `norm_relu` is applied to it as it is."""

    def forward(self, normed: Tensor) -> Tensor:
        return normed


def after(normed: Tensor, shortcut: Tensor, what: str) -> Tensor:
    if what == "nothing":
        return normed
    return norm_relu(Given(), normed, shortcut if what.startswith("shortcut") else None)


def images(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, the slope of y, a shortcut, the slope of a second use of y."""
    torch.manual_seed(0)
    made = [(torch.randn(shape, device=device) + shift).to(dtype) for shift in (3, 0, 0, 0)]
    return [one.contiguous(memory_format=LAST) if one.ndim == 4 else one for one in made]


def scales(channels: int, affine: str, device: str) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = torch.rand(2, channels, device=device) + 0.5
    return (weight if affine != "none" else None), (bias - 1 if affine == "both" else None)


def check_batch_norm(device: str) -> None:
    """Both ways, with every client's statistics, running and affine or not."""
    from normec.kernels import batch_norm

    shapes = ((3, 5, (5,)), (2, 4, (17, 3, 5)), (2, 3, (70, 9, 11)), (1, 3, (64, 1, 1)))
    kinds = [*(("both", follows) for follows in AFTER), ("weight", "relu"), ("none", "relu")]
    for (dtype, close), (clients, records, shape), (affine, what_follows) in combined(
        device, PRECISIONS, shapes, kinds
    ):
        channels, what = shape[0], (dtype, shape, affine, what_follows)
        relu, joined, both = what_follows != "nothing", "cut" in what_follows, "two" in what_follows
        x, g, shortcut, more = images((clients * records, *shape), dtype, device)
        weight, bias = scales(channels, affine, device)
        running = (torch.randn(clients, channels, device=device), torch.rand(clients, channels, device=device))
        before = [part.double() for part in running]
        y, mean, inverse = batch_norm.forward(
            x, weight, bias, running, clients, 0.3, 1e-3, relu, shortcut if joined else None
        )
        (wide, by_weight), (broad, by_bias) = (framed(clients, channels, device=device) for _ in range(2))
        dx, passed = batch_norm.backward(
            g, x, weight, bias, mean, inverse, by_weight, by_bias, relu, y if joined else None,
            more if both else None,
        )  # fmt: skip
        untouched(wide)
        untouched(broad)
        g = g.double() + more.double() if both else g
        for i in range(clients):
            own, slope, added = (part.double().chunk(clients)[i].requires_grad_() for part in (x, g, shortcut))
            known = [None if p is None else p.double().requires_grad_() for p in (weight, bias)]
            normed = F.batch_norm(own, before[0][i], before[1][i], *known, True, 0.3, 1e-3)  # type: ignore[arg-type]
            expected = after(normed, added, what_follows)
            near(y.chunk(clients)[i], expected.detach(), close, ("forward", *what, i))
            wanted = [own, *(p for p in known if p is not None), *([added] if joined else [])]
            slopes = list(torch.autograd.grad(expected, wanted, slope))
            if passed is not None:
                near(passed.chunk(clients)[i], slopes.pop(), KINK, ("shortcut", *what, i))
            near(dx.chunk(clients)[i], slopes[0], 2 * (KINK if relu else close), ("data", *what, i))
            for rows, expected_rows in zip((by_weight, by_bias), slopes[1:], strict=False):
                near(rows[i], expected_rows, KINK if relu else 1e-5, ("scales", *what, i))
            for found, statistic in zip(running, before, strict=True):
                near(found[i], statistic[i], 1e-5, ("running", *what, i))


def check_group_norm(device: str) -> None:
    """Both ways, image by image: images that a program holds, and larger ones."""
    from normec.kernels import group_norm

    _check_group_norm(device)
    with mock.patch.object(group_norm, "HELD", 0):
        _check_group_norm(device)


def _check_group_norm(device: str) -> None:
    from normec.kernels import group_norm

    assert not group_norm.fits(6, 3)
    assert not group_norm.fits(8, 16)
    shapes = ((3, 8, 4, 3, 5), (2, 16, 4, 1, 1), (2, 4, 1, 40, 33), (3, 8, 8, 2, 7))
    kinds = [*(("both", follows) for follows in AFTER), ("weight", "relu"), ("none", "nothing")]
    for (dtype, close), shape, (affine, what_follows) in combined(device, PRECISIONS, shapes, kinds):
        count, channels, groups, height, width = shape
        what, relu, joined = (dtype, *shape, affine, what_follows), what_follows != "nothing", "cut" in what_follows
        both = "two" in what_follows
        assert group_norm.fits(channels, groups)
        x, g, shortcut, more = images((count, channels, height, width), dtype, device)
        weight, bias = scales(channels, affine, device)
        y, mean, inverse = group_norm.forward(x, groups, weight, bias, 1e-4, relu, shortcut if joined else None)
        dx, sums, passed = group_norm.backward(
            g, x, groups, weight, bias, mean, inverse, relu, y if joined else None, more if both else None
        )
        g = g.double() + more.double() if both else g
        own, added = x.double().requires_grad_(), shortcut.double().requires_grad_()
        known = [None if p is None else p.double().requires_grad_() for p in (weight, bias)]
        expected = after(F.group_norm(own, groups, *known, 1e-4), added, what_follows)  # type: ignore[arg-type]
        near(y, expected.detach(), close, ("forward", *what))
        wanted = [own, *(p for p in known if p is not None), *([added] if joined else [])]
        slopes = list(torch.autograd.grad(expected, wanted, g.double()))
        if passed is not None:
            near(passed, slopes.pop(), KINK, ("shortcut", *what))
        # A group of two numbers hardly has a slope: what is left of it is the rounding of its terms.
        near(dx, slopes[0], (2 if height * width > 1 else 20) * (KINK if relu else close), ("data", *what))
        for found, slope in zip(sums.sum(0), slopes[1:], strict=False):
            near(found, slope, KINK if relu else 1e-5, ("scales", *what))


def check_nan_stays(device: str) -> None:
    """A run that diverges must show it: ReLU lets NaN through, also as part of a kernel."""
    from normec.kernels import batch_norm, group_norm

    x, _, shortcut, _ = images((2, 8, 3, 5), torch.float32, device)
    x[0, 0, 0, 0] = torch.nan
    y, _, _ = batch_norm.forward(x, None, None, None, 2, 0.1, 1e-5, True, shortcut)
    z, _, _ = group_norm.forward(x, 4, None, None, 1e-5, True, shortcut)
    for out in (y, z):
        assert out[0, 0].isnan().all()
        assert out[1].isfinite().all()


def check_norms_in_evaluations(device: str) -> None:
    """In evaluations a norm, a shortcut and ReLU are one kernel, and the numbers those of the three."""
    for shape, joined in product(((4, 16, 9, 7), (3, 8, 1, 2), (2, 64, 40, 33)), (False, True)):
        x, _, shortcut, _ = images(shape, torch.float32, device)
        batch, group = nn.BatchNorm2d(shape[1]), nn.GroupNorm(4, shape[1])
        for norm in (batch, group, nn.BatchNorm2d(shape[1], affine=False)):
            norm.to(device).eval()
            for value in norm.state_dict().values():
                if value.is_floating_point():
                    value.copy_(torch.rand_like(value) + 0.5)
            added = shortcut if joined else None
            expected = norm_relu(norm, x, added).detach().double()
            with torch.no_grad(), kernels.evaluating():
                found, names = _watched(partial(norm_relu, norm, x, added))
            near(found, expected, 1e-5, (shape, norm))
            assert not names, names


def check_evaluations(device: str) -> None:
    """A problem is evaluated with the kernels, unless they change what comes out."""
    from normec.kernels import batch_norm

    torch.manual_seed(0)
    parts = [TensorDataset(torch.randn(7, 8, 6, 4), torch.arange(7) % 4)]
    layers = (Block(8, 8, 1, nn.BatchNorm2d), Block(8, 16, 2, nn.BatchNorm2d), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    of = Problem(nn.Sequential(*layers, nn.Linear(16, 4)), F.cross_entropy, parts, test=parts[0])
    of, usual = of.to(torch.device(device), torch.float32), batch_norm.evaluate
    buffers = of.initial_buffers()
    with mock.patch.object(of, "_use_kernels", return_value=False):
        expected = of.evaluate(of.x0, buffers)
    for factor, good in ((1, True), (2, False)):
        moved = of.to(torch.device(device))
        with mock.patch.object(batch_norm, "evaluate", lambda *given, by=factor: by * usual(*given)):
            found = moved.evaluate(of.x0, buffers)
        assert moved._evaluator()._kernels_agree is good
        near(torch.tensor(list(found.values())), torch.tensor(list(expected.values())), 1e-4, (found, expected))


def _watched(call: Callable[[], Tensor]) -> tuple[Tensor, set[str]]:
    """What a call returns, and PyTorch's own norms and ReLU among the functions that it calls.

    A dispatch mode would see no kernels: inside one, there are none.
    """
    seen: set[str] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        found = call()
    return found, {name for name in seen if "batch_norm" in name or "group_norm" in name or "relu" in name}


def check_norm_relu_in_a_model(device: str) -> None:
    """Blocks of ResNet20 in one pass for all clients, the kernels at work, against autograd client by client."""
    clients, records = 2, 3
    for norm in (nn.BatchNorm2d, lambda channels: nn.GroupNorm(4, channels)):
        torch.manual_seed(0)
        layers = (Block(8, 8, 1, norm), Block(8, 16, 2, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
        x, labels = torch.randn(clients * records, 8, 6, 4), torch.arange(clients * records) % 4
        parts = [TensorDataset(*pair) for pair in zip(x.chunk(clients), labels.chunk(clients), strict=True)]
        of = Problem(nn.Sequential(*layers), F.cross_entropy, parts).to(torch.device(device), torch.float32)
        made = ModuleModel(of)
        model, sink = made.model, made.sink
        grads, buffers = torch.full((clients, len(of.x0)), torch.nan, device=device), of.initial_buffers()
        sink.fill(of.x0, grads, buffers)
        with products("float32"), mock.patch.object(norms, "_slopes", wraps=norms._slopes) as called:
            outputs = model.train()(x.to(device))
            names = {type(node).__name__ for node in nodes(outputs.grad_fn)}
            # ReLU, and the shortcut that changes the size, are the kernels' as well.
            assert not any(part in name for part in ("Relu", "Pad", "Slice") for name in names), names
            (F.cross_entropy(outputs, labels.to(device), reduction="none").sum() / records).backward()  # type: ignore[no-untyped-call]
        sink.finish()
        pairs = [call.args[0] for call in called.call_args_list]
        assert sum(None not in pair for pair in pairs) == 1  # what comes out of the first block is used twice
        by_autograd(of, grads, x, labels, norm)


def check_a_hooked_norm_stays_alone(device: str) -> None:
    """A hook sees what the norm makes, before shortcut and ReLU."""
    torch.manual_seed(0)
    block, seen = Block(8, 8, 1, nn.BatchNorm2d), []
    block.norm1.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    layers = nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, labels = torch.randn(4, 8, 5, 4), torch.arange(4)
    of = Problem(layers, F.cross_entropy, [TensorDataset(x, labels)]).to(torch.device(device), torch.float32)
    made = ModuleModel(of)
    model, sink = made.model, made.sink
    sink.fill(of.x0, torch.zeros(1, len(of.x0), device=device), of.initial_buffers())
    seen.clear()  # of what the problem tried on the model
    outputs = model.train()(x.to(device))
    sink.clear()
    assert len(seen) == 1
    assert bool((seen[0] < 0).any())
    assert sum("Relu" in type(node).__name__ for node in nodes(outputs.grad_fn)) == 1


CHECKS: tuple[Callable[[str], None], ...] = (
    check_batch_norm,
    check_group_norm,
    check_nan_stays,
    check_norms_in_evaluations,
    check_evaluations,
    check_norm_relu_in_a_model,
    check_a_hooked_norm_stays_alone,
)
