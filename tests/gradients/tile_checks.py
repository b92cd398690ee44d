"""The kernels of 3×3 convolutions against autograd in float64; run by `kernel_checks`.

The interpreter multiplies no matrices of bfloat16: there the checks are in float16 alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from normec import Problem
from normec.gradients.shared.rules import convert
from normec.kernels import tiles

from .nearness import LAST, framed, near, untouched

# clients, records, channels in and out, stride, height, width
SHAPES = [
    (3, 2, 16, 16, 1, 6, 8),
    (1, 3, 16, 16, 1, 25, 17),  # enough tiles for several spans, and a row and a column too many for them
    (2, 2, 3, 16, 1, 5, 6),
    (2, 2, 16, 32, 2, 6, 8),
    (2, 1, 32, 32, 1, 4, 5),
    (2, 2, 32, 64, 2, 7, 5),
    (2, 1, 64, 64, 1, 5, 4),
    (2, 2, 5, 7, 2, 6, 5),
    (2, 1, 64, 48, 2, 4, 4),
]


def halves(device: str) -> dict[torch.dtype, float]:
    """Precisions, and how near a result that is rounded to one must be."""
    return {torch.float16: 1e-3} | ({torch.bfloat16: 8e-3} if device != "cpu" else {})


def check_tiled_convolution(device: str) -> None:
    """Forward, data gradient, and every client's weight gradient."""
    from normec.kernels.convolution import convolve, pack
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
            g = torch.randn_like(y).to(dtype).contiguous(memory_format=LAST)
            (by_x,) = torch.autograd.grad(y, fine, g.double(), retain_graph=True)
            for way, source, expected in (
                (tiles.forward(inputs, outputs, stride), x, y.detach()),
                (tiles.backward(inputs, outputs, stride), g, by_x),
            ):
                table = way.table(11).flatten().to(device)
                weights = pack(flat, table, dtype)
                plain = torch.where(table >= 0, flat[table.clamp(min=0).long()], 0).to(dtype)
                assert torch.equal(weights, plain), what
                found = convolve(source, weights, way, (expected.shape[2], expected.shape[3]))
                assert found.is_contiguous(memory_format=LAST)
                near(found, expected, close, ("images", *what))
            matrix, rows = framed(clients, outputs, inputs, 3, 3, device=device)
            of_tiles(x, g, rows, stride)
            untouched(matrix)
            for row, own, slope in zip(rows, x.chunk(clients), g.chunk(clients), strict=True):
                made = F.conv2d(own.double(), weight, None, stride, 1)
                near(row, torch.autograd.grad(made, weight, slope.double())[0], 5e-5, ("weights", *what))
            again = torch.empty_like(rows, memory_format=torch.contiguous_format)
            of_tiles(x, g, again, stride)
            assert torch.equal(again, rows), ("a rerun has other bits", *what)


def network() -> nn.Module:
    """Two layers that the kernels do, one of them passed twice, one that they do not, and one with a bias."""
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
        model, sink = convert(of)
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


CHECKS: tuple[Callable[[str], None], ...] = (check_tiled_convolution, check_tiled_pass)
