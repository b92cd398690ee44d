"""The kernels of norms, alone and with a shortcut and ReLU, against autograd in float64; run by `kernel_checks`."""

from __future__ import annotations

import copy
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
from normec.gradients.shared.operations import OperationModel
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
        sink = made.sink
        grads, buffers = torch.full((clients, len(of.x0)), torch.nan, device=device), of.initial_buffers()
        sink.fill(of.x0, grads, buffers)
        with products("float32"), mock.patch.object(norms, "_slopes", wraps=norms._slopes) as called:
            outputs = made.outputs(x.to(device))
            names = {type(node).__name__ for node in nodes(outputs.grad_fn)}
            # ReLU, and the shortcut that changes the size, are the kernels' as well.
            assert not any(part in name for part in ("Relu", "Pad", "Slice") for name in names), names
            (F.cross_entropy(outputs, labels.to(device), reduction="none").sum() / records).backward()  # type: ignore[no-untyped-call]
        sink.finish()
        pairs = [call.args[0] for call in called.call_args_list]
        assert sum(None not in pair for pair in pairs) == 1  # what comes out of the first block is used twice
        by_autograd(of, grads, x, labels, norm)


def check_hooked_norms_stay_alone(device: str) -> None:
    """A hook sees what a norm makes, before shortcut and ReLU."""
    torch.manual_seed(0)
    block, seen = Block(8, 8, 1, nn.BatchNorm2d), []
    block.norm1.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    layers = nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, labels = torch.randn(4, 8, 5, 4), torch.arange(4)
    of = Problem(layers, F.cross_entropy, [TensorDataset(x, labels)]).to(torch.device(device), torch.float32)
    made = ModuleModel(of)
    made.sink.fill(of.x0, torch.zeros(1, len(of.x0), device=device), of.initial_buffers())
    seen.clear()  # of what the problem tried on the model
    outputs = made.outputs(x.to(device))
    made.sink.clear()
    assert len(seen) == 1
    assert bool((seen[0] < 0).any())
    assert sum("Relu" in type(node).__name__ for node in nodes(outputs.grad_fn)) == 2


class Spelled(nn.Module):
    """Two convolutions with norms, and what comes after the norms, said in one of several ways."""

    def __init__(self, way: str, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(norm(8) for _ in range(3))
        self.relu = nn.ReLU(inplace=way == "modules in place")
        self.down = nn.Sequential(nn.Conv2d(4, 8, 1), norm(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.first(x))
        h = F.relu(h) if self.way == "functions" else self.relu(h)
        out, shortcut = self.norms[1](self.second(h)), self.down(x)
        match self.way:
            case "modules in place":
                out += shortcut
                out = self.relu(out)
            case "functions":
                out = F.relu(shortcut + out)
            case "methods":
                out = out.add_(h).relu_() + h
            case "used before":
                out = out + out.relu() + 2 * (out + h).relu()
            case "changed":
                size = out.shape[2]
                out.mul_(2)
                out = (out + h).relu() * size + h
            case "another shape":
                out = F.relu(out + shortcut.mean((2, 3), keepdim=True)) + F.relu(torch.cat([out, h]).chunk(2)[0])
            case "nothing else":
                self.norms[2](h)  # its statistics count
                return self.head((out + h).mean((2, 3)))
            case "without gradients":
                with torch.no_grad():
                    fixed = self.norms[2](self.first(x))
                    seen = out.abs().amax()
                out = F.relu(fixed) + F.relu(out + shortcut) + h + 0 * seen
            case "shortcuts that change":
                waiting, sized = out + shortcut, 1 * h
                shortcut.clamp_(-0.1, 0.1)
                again = self.norms[0](self.first(x)) + sized
                sized.clamp_(max=0.1)
                out = F.relu(waiting) + shortcut + F.relu(again) + sized
            case "outputs that change":
                first = F.relu(self.norms[1](self.second(0.5 * h.detach())) + out)
                out.clamp_(-0.1, 0.1)
                out = first + F.relu(self.norms[1](self.second(0.25 * h.detach())) + out) + out
            case "called twice":
                later = self.norms[1](self.second(3 * h + 1))
                out = F.relu(later) * out
            case "a sum of three":
                out = torch.add(out, h, alpha=2) + F.relu(out + h + shortcut) - F.relu(self.norms[0](out))
        return self.head(out.mean((2, 3)))


LEFT = {  # how often ReLU is left to PyTorch
    "modules in place": 0,
    "functions": 0,
    "methods": 0,
    "used before": 0,
    "changed": 1,
    "another shape": 2,
    "nothing else": 0,
    "without gradients": 0,
    "shortcuts that change": 2,
    "outputs that change": 0,
    "called twice": 0,
    "a sum of three": 0,
}


def check_norms_wait(device: str) -> None:
    """Whatever follows a norm, its kernel computes the same as PyTorch does, and counts a batch once."""
    clients, records = 2, 3
    kinds: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 4)}
    for (way, left), (kind, norm), rules in product(LEFT.items(), kinds.items(), (ModuleModel, OperationModel)):
        torch.manual_seed(0)
        model = Spelled(way, norm)
        x, labels = torch.randn(clients * records, 4, 6, 5), torch.arange(clients * records) % 4
        parts = [TensorDataset(*pair) for pair in zip(x.chunk(clients), labels.chunk(clients), strict=True)]
        of = Problem(model, F.cross_entropy, parts).to(torch.device(device), torch.float32)
        made = rules(of)
        buffers, grads = of.initial_buffers(), torch.full((clients, len(of.x0)), torch.nan, device=device)
        made.sink.fill(of.x0, grads, buffers)
        with products("float32"), made.guard():
            losses = made.losses(x.to(device), labels.to(device).view(clients, -1))
            found = sum("Relu" in type(node).__name__ for node in nodes(losses.grad_fn))
            losses.sum().backward()  # type: ignore[no-untyped-call]
        made.collect()
        made.sink.finish()
        if kind == "batch" or rules is ModuleModel:
            assert found == left, (way, kind, rules.__name__, found)
        by_autograd(of, grads, x, labels, (way, kind, rules.__name__))
        for client, own in enumerate(x.chunk(clients)):
            reference = copy.deepcopy(model).float().cpu().train()
            for name, value in of.initial_buffers().items():
                reference.get_buffer(name).copy_(value[client])
            reference(own)
            for name, value in buffers.items():
                near(value[client].cpu(), reference.get_buffer(name), 1e-5, (way, kind, rules.__name__, name))


class Squared(torch.autograd.Function):
    """Code that is called with a norm's output, and that PyTorch does not show to anybody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(Squared.apply(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-untyped-call]
        return found


def check_what_nobody_sees_fails(device: str) -> None:
    """A function that gets what stands for a norm's output ends the pass, and never leaves a gradient out."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 4, 6, 5), torch.arange(4)
    of = Problem(Hidden(), F.cross_entropy, [TensorDataset(x, labels)]).to(torch.device(device), torch.float32)
    made = ModuleModel(of)
    made.sink.fill(of.x0, torch.zeros(1, len(of.x0), device=device), of.initial_buffers())
    failed = False
    try:
        made.losses(x.to(device), labels.to(device)[None]).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        failed = True
    assert failed


CHECKS: tuple[Callable[[str], None], ...] = (
    check_batch_norm,
    check_group_norm,
    check_nan_stays,
    check_norms_in_evaluations,
    check_evaluations,
    check_norm_relu_in_a_model,
    check_hooked_norms_stay_alone,
    check_norms_wait,
    check_what_nobody_sees_fails,
)
