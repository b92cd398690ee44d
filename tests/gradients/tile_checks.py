"""The kernels of 3×3 convolutions against autograd in float64; run by `kernel_checks`.

The interpreter multiplies no matrices of bfloat16: there the checks are in float16 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.utils.data import TensorDataset

from normec import Problem
from normec.gradients.shared.rules import ModuleModel
from normec.kernels import tiles

from .nearness import LAST, framed, near, untouched

# clients, records, channels in and out, stride, height, width
SHAPES = [
    (3, 2, 16, 16, 1, 6, 8),
    (1, 3, 16, 16, 1, 25, 17),  # enough tiles for several spans, and a row and a column too many for them
    (2, 2, 3, 16, 1, 5, 6),
    (2, 1, 1, 16, 1, 4, 6),
    (2, 1, 2, 3, 2, 5, 4),
    (2, 1, 16, 32, 1, 4, 6),
    (2, 2, 16, 32, 2, 6, 8),
    (2, 1, 32, 32, 1, 4, 5),
    (2, 1, 32, 32, 1, 5, 8),
    (3, 3, 3, 16, 1, 9, 32),  # images that do not fill the last program
    (2, 2, 32, 64, 2, 7, 5),
    (2, 1, 32, 64, 1, 5, 4),
    (2, 1, 64, 64, 1, 5, 4),
    (2, 2, 5, 7, 2, 6, 5),
    (2, 1, 64, 48, 2, 4, 4),
]


def halves(device: str) -> dict[torch.dtype, float]:
    """Precisions, and how near a result that is rounded to one must be."""
    return {torch.float16: 1e-3} | ({torch.bfloat16: 8e-3} if device != "cpu" else {})


def check_tiled_convolution(device: str) -> None:
    """Forward, data gradient, and every client's weight gradient."""
    from normec.kernels import sweep
    from normec.kernels.convolution import convolve, pack, widened
    from normec.kernels.weight_gradients import of_tiles

    for clients, records, inputs, outputs, stride, height, width in SHAPES:
        for dtype, close in halves(device).items():
            torch.manual_seed(0)
            what = (inputs, outputs, stride, height, width, dtype)
            flat = torch.randn(11 + 9 * inputs * outputs + 5, device=device)
            weight = flat[11:-5].view(outputs, inputs, 3, 3).to(dtype).double().requires_grad_()
            x = torch.randn(clients * records, inputs, height, width, device=device).to(dtype)
            x = x.contiguous(memory_format=LAST)
            fine = x.double().requires_grad_()
            y = F.conv2d(fine, weight, None, stride, 1)
            wide = widened(x, dtype)
            assert torch.equal(wide[:, :inputs], x)
            assert not wide[:, inputs:].any()
            g = torch.randn_like(y).to(dtype).contiguous(memory_format=LAST)
            (by_x,) = torch.autograd.grad(y, fine, g.double(), retain_graph=True)
            for way, source, expected in (
                (tiles.forward(inputs, outputs, stride), wide, y.detach()),
                (tiles.backward(inputs, outputs, stride), g, by_x),
            ):
                table = way.table(11).flatten().to(device)
                weights = pack(flat, table, dtype)
                plain = torch.where(table >= 0, flat[table.clamp(min=0).long()], 0).to(dtype)
                assert torch.equal(weights, plain), what
                found = convolve(source, weights, way, (expected.shape[2], expected.shape[3]))
                assert found.is_contiguous(memory_format=LAST)
                near(found, expected, close, ("images", *what))
                added = torch.randn(way.writes, device=device)
                biased = convolve(source, weights, way, (expected.shape[2], expected.shape[3]), bias=added)
                near(biased, expected + added[:, None, None], close, ("biased", *what))
                rows = torch.stack([flat, *(torch.randn_like(flat) for _ in range(clients - 1))])
                own, biases = pack(rows, table, dtype), torch.randn(clients, way.writes, device=device)
                several = convolve(source, own, way, (expected.shape[2], expected.shape[3]), bias=biases)
                each = []
                for row, part, slope, more in zip(rows, x.chunk(clients), g.chunk(clients), biases, strict=True):
                    mine = row[11:-5].view(outputs, inputs, 3, 3).to(dtype).double()
                    if source is g:
                        made = conv2d_input(part.shape, mine, slope.double(), stride, 1)
                    else:
                        made = F.conv2d(part.double(), mine, None, stride, 1)
                    each.append(made + more[:, None, None])
                near(several, torch.cat(each), close, ("weights of clients", *what))
                strips = sweep.settings(way, len(source), source.shape[2:], expected.shape[2:]) is not None
                if device == "cpu" and not strips:
                    continue  # it would be the same programs again
                with mock.patch.object(sweep, "_FILLED", 1):  # strips as long as on a device that is filled
                    assert torch.equal(convolve(source, weights, way, (expected.shape[2], expected.shape[3])), found)
            for few in (0, 2**31):  # tiles for clients of many pixels, and of few
                with mock.patch.object(tiles, "FEW", few):
                    matrix, rows = framed(clients, outputs, inputs, 3, 3, device=device)
                    of_tiles(wide, g, rows, stride)
                    untouched(matrix)
                    for row, own, slope in zip(rows, x.chunk(clients), g.chunk(clients), strict=True):
                        made = F.conv2d(own.double(), weight, None, stride, 1)
                        near(row, torch.autograd.grad(made, weight, slope.double())[0], 5e-5, ("weights", *what))
                    if device == "cpu" and records < 3:
                        continue  # interpreted programs run one after another: a few reruns show numbers left unset
                    again = torch.empty_like(rows, memory_format=torch.contiguous_format)
                    of_tiles(wide, g, again, stride)
                    assert torch.equal(again, rows), ("a rerun has other bits", *what)


def network() -> nn.Module:
    """Layers that the kernels do, one of them passed twice, one with a bias, and one that they do not."""
    twice = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.Tanh(),
        twice,
        nn.Tanh(),
        twice,
        nn.Conv2d(16, 20, 3, 2, 1, bias=False),
        nn.Tanh(),
        nn.Conv2d(20, 8, 1, bias=False),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def check_tiled_pass(device: str) -> None:
    """The shared pass through a network in half precision against autograd, client by client, in float64."""
    for dtype in halves(device):
        torch.manual_seed(0)
        clients, records = 3, 4
        x, labels = torch.randn(clients * records, 3, 7, 6), torch.arange(clients * records) % 4
        parts = [TensorDataset(*pair) for pair in zip(x.chunk(clients), labels.chunk(clients), strict=True)]
        of = Problem(network(), F.cross_entropy, parts).to(torch.device(device), torch.float32)
        made = ModuleModel(of)
        model, sink = made.model, made.sink
        grads = torch.full((clients, len(of.x0)), torch.nan, device=device)
        sink.fill(of.x0, grads, {})
        with torch.autocast(torch.device(device).type, dtype, cache_enabled=False):
            losses = F.cross_entropy(model(x.to(device)).float(), labels.to(device), reduction="none")
            (losses.sum() / records).backward()
        assert sink.packing._packed is not None, "the kernels were not used"
        sink.finish()
        assert sink.packing._packed is None
        model = of.model.double().cpu()
        for found, own, label in zip(grads, x.double().chunk(clients), labels.chunk(clients), strict=True):
            model.zero_grad()
            F.cross_entropy(model(own), label).backward()  # type: ignore[no-untyped-call]
            expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            near(found.cpu(), expected, 5e-3 if dtype == torch.float16 else 4e-2, dtype)


def check_moments(device: str) -> None:
    """A BatchNorm that gets the moments from the convolution before it, against one in float64 on what that made."""
    from normec.kernels import batch_norm
    from normec.kernels.convolution import convolve, moments_of, pack, widened

    shapes = [(2, 16, 16, 16, 1, 4, 8), (3, 8, 3, 16, 1, 6, 16), (2, 4, 20, 40, 2, 15, 8), (1, 33, 64, 64, 1, 8, 8)]
    shapes = [(2, 8, 32, 32, 1, 2, 16), (2, 32, 16, 16, 1, 4, 4), *shapes]
    for (clients, records, inputs, outputs, stride, height, width), dtype in product(shapes, halves(device)):
        torch.manual_seed(0)
        what = (clients, inputs, outputs, stride, dtype)
        way, size = tiles.forward(inputs, outputs, stride), tiles.size((height, width), stride)
        x = torch.randn(clients * records, inputs, height, width, device=device).to(dtype)
        x = widened(x + 3, dtype)  # means far from zero
        weights = pack(torch.randn(9 * inputs * outputs, device=device), way.table(0).flatten().to(device), dtype)
        moments = moments_of(x, way, size, clients)
        assert moments is not None, what
        made = convolve(x, weights, way, size, moments)
        assert torch.equal(made, convolve(x, weights, way, size)), what
        running = torch.randn(clients, outputs, device=device), torch.rand(clients, outputs, device=device)
        before = [part.double() for part in running]
        y, mean, inverse = batch_norm.forward(made, None, None, running, clients, 0.3, 1e-3, moments=moments)
        for i, own in enumerate(made.double().chunk(clients)):
            expected = F.batch_norm(own, before[0][i], before[1][i], None, None, True, 0.3, 1e-3)
            near(y.chunk(clients)[i], expected, 1e-3 if dtype == torch.float16 else 8e-3, ("normed", *what))
            near(mean[i], own.mean((0, 2, 3)), 1e-5, ("mean", *what))
            near(inverse[i], (own.var((0, 2, 3), correction=0) + 1e-3).rsqrt(), 1e-5, ("scale", *what))
            for found, statistic in zip(running, before, strict=True):
                near(found[i], statistic[i], 1e-5, ("running", *what))
    assert moments_of(x[:5], way, (8, 8), 5) is not None
    assert moments_of(x[:6, :, :7], tiles.forward(64, 64, 1), (7, 8), 2) is None  # 3 · 56 tiles a client
    assert moments_of(x, tiles.forward(16, 16, 1), (8, 7), 1) is None  # tiles two pixels wide
    assert moments_of(x[:32], tiles.forward(16, 16, 1), (8, 8), 2) is not None
    assert moments_of(x[:16], tiles.forward(16, 16, 1), (8, 8), 2) is None  # 8 · 4 tiles a client and row


class Changed(nn.Module):
    """A convolution, a BatchNorm after it, and in between perhaps a change that the convolution does not know of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), how
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if self.how == "in place":
            x = x.mul_(3).add_(1)
        elif self.how == "another":
            x = 3 * x + 1
        found: torch.Tensor = self.head(torch.tanh(self.norm(x)).mean((2, 3)))
        return found


def check_moments_in_a_model(device: str) -> None:
    """They are used where a convolution's images come as they left it, and only there."""
    for how, dtype in product(("as it is", "in place", "another"), halves(device)):
        torch.manual_seed(0)
        clients, records = 2, 8
        x, labels = torch.randn(clients * records, 3, 8, 16), torch.arange(clients * records) % 4
        parts = [TensorDataset(*pair) for pair in zip(x.chunk(clients), labels.chunk(clients), strict=True)]
        of = Problem(Changed(how), F.cross_entropy, parts).to(torch.device(device), torch.float32)
        made = ModuleModel(of)
        model, sink = made.model, made.sink
        used = []
        moments_of = sink.moments_of

        def noted(images: torch.Tensor, moments_of: Any = moments_of, used: list[bool] = used) -> Any:
            found = moments_of(images)
            used.append(found is not None)
            return found

        sink.moments_of = noted  # type: ignore[method-assign]
        grads = torch.full((clients, len(of.x0)), torch.nan, device=device)
        buffers = of.initial_buffers()
        sink.fill(of.x0, grads, buffers)
        with torch.autocast(torch.device(device).type, dtype, cache_enabled=False):
            losses = F.cross_entropy(model(x.to(device)).float(), labels.to(device), reduction="none")
            (losses.sum() / records).backward()
        sink.finish()
        assert used == [how == "as it is"], (how, used)
        assert not sink.moments
        fine = of.model.double().cpu()
        start = {name: value.clone() for name, value in fine.state_dict().items()}
        for i, (found, own, label) in enumerate(
            zip(grads, x.double().chunk(clients), labels.chunk(clients), strict=True)
        ):
            fine.load_state_dict(start)
            fine.zero_grad()
            F.cross_entropy(fine(own), label).backward()  # type: ignore[no-untyped-call]
            expected = torch.cat([p.grad.flatten() for p in fine.parameters() if p.grad is not None])
            near(found.cpu(), expected, 1e-2 if dtype == torch.float16 else 8e-2, (how, dtype))
            for name, value in fine.named_buffers():
                near(buffers[name][i].cpu(), value, 2e-3 if dtype == torch.float16 else 2e-2, (how, name))


CHECKS: tuple[Callable[[str], None], ...] = (
    check_tiled_convolution,
    check_tiled_pass,
    check_moments,
    check_moments_in_a_model,
)
