"""Time the kernels of 3×3 convolutions and norms on a GPU for many settings, to choose the settings.

    python -m benchmarks.speed.kernels [SECONDS] [NETWORK | KIND …]

The shapes are those of ResNet20 or ResNet18 with ten clients of 32 images, or of CNNs with many small clients, in
bfloat16. The result of every setting is compared with that of the current one, and a wrong result counts as infinitely
slow.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from normec.errors import one_of
from normec.kernels import batch_norm, convolution, group_norm_pool, sweep, tiles, weight_gradients

from .shapes import NETWORKS, Layer

REPEATS, SETS = 5, 3  # calls per graph, and sets of images

Setting = tuple[Any, ...]
Calls = list[Callable[[], Tensor]]


def _ceiling(number: int, by: int) -> int:
    return -(-number // by)


def images(count: int, channels: int, height: int) -> list[Tensor]:
    shape = (count, channels, height, height)
    return [convolution.widened(torch.randn(shape, device="cuda"), torch.bfloat16) for _ in range(SETS)]


def is_swept(layer: Layer, way: str) -> bool:
    cut, size = getattr(tiles, way)(*layer[:3]), tiles.size((layer[3], layer[3]), layer[2])
    return sweep.settings(cut, layer[4] * layer[5], (layer[3], layer[3]), size) is not None


def sweeps(layer: Layer, way: str, setting: Setting | None) -> tuple[Any, Calls]:
    """A setting is (tiles per program, rows, warps, stages)."""
    usual = sweep.settings

    def settings(*given: Any) -> Any:
        found = usual(*given)
        if found is None or setting is None:
            return found
        meta, _, _ = found
        count, strip, warps, stages = setting
        grid = (_ceiling(layer[4] * layer[5] * meta["ACROSS"], count), _ceiling(meta["H"], strip))
        return meta | {"TILES": count, "STRIP": strip}, grid, {"num_warps": warps, "num_stages": stages}

    return mock.patch.object(sweep, "settings", settings), convolutions(layer, way, None)[1]


def convolutions(layer: Layer, way: str, setting: Setting | None) -> tuple[Any, Calls]:
    """A setting is (tiles per program, columns, warps)."""
    inputs, outputs, stride, height, clients, records = layer
    cut = getattr(tiles, way)(inputs, outputs, stride)
    small = tiles.size((height, height), stride)
    seen = (inputs, height) if way == "forward" else (outputs, small[0])
    source = images(clients * records, *seen)
    size = small if way == "forward" else (height, height)
    flat = 0.1 * torch.randn(9 * inputs * outputs, device="cuda")
    weights = convolution.pack(flat, cut.table(0).flatten().cuda(), torch.bfloat16)
    usual = convolution.settings

    def settings(*given: Any) -> Any:
        meta, grid, options = usual(*given)
        if setting is not None:
            tall, wide, warps = setting
            count = len(source[0]) * meta["GH"] * meta["GW"]
            meta |= {"BLOCK_M": tall, "BLOCK_N": min(wide, cut.breadth)}
            grid = (_ceiling(count, tall), _ceiling(cut.breadth, meta["BLOCK_N"]))
            options = {"num_warps": warps}
        return meta, grid, options

    calls: Calls = [lambda x=x: convolution.convolve(x, weights, cut, size) for x in source]  # type: ignore[misc]
    return mock.patch.object(convolution, "settings", settings), calls


def gradients(layer: Layer, _: str, setting: Setting | None) -> tuple[Any, Calls]:
    """A setting is (input rows per program, tiles per step, total programs, warps, stages)."""
    inputs, outputs, stride, height, clients, records = layer
    xs = images(clients * records, inputs, height)
    gs = images(clients * records, outputs, tiles.size((height, height), stride)[0])
    rows = torch.empty(clients, outputs, inputs, 3, 3, device="cuda")
    usual = weight_gradients.settings

    def settings(cut: tiles.Tiles, clients: int, count: int, *given: Any) -> Any:
        meta, grid, options = usual(cut, clients, count, *given)
        if setting is not None:
            taken, block, programs, warps, stages = setting
            steps, groups = _ceiling(count * meta["GH"] * meta["GW"], block), _ceiling(cut.rows * cut.chunks, taken)
            splits = max(1, min(64, steps // 2, programs // (clients * groups)))
            meta |= {"TAKEN": taken, "BLOCK_K": block, "SPLITS": splits}
            grid, options = (clients * splits, groups), {"num_warps": warps, "num_stages": stages}
        return meta, grid, options

    def call(x: Tensor, g: Tensor) -> Tensor:
        weight_gradients.of_tiles(x, g, rows, stride)
        return rows

    calls: Calls = [lambda x=x, g=g: call(x, g) for x, g in zip(xs, gs, strict=True)]  # type: ignore[misc]
    return mock.patch.object(weight_gradients, "settings", settings), calls


def many_channels(layer: Layer, _: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Weight gradients; a setting is (output channels, columns and pixels per block, warps, stages)."""
    inputs, outputs, stride, height, clients, records = layer
    xs = images(clients * records, inputs, height)
    gs = images(clients * records, outputs, tiles.size((height, height), stride)[0])
    rows = torch.empty(clients, outputs, inputs, 3, 3, device="cuda")
    usual = weight_gradients.blocks

    def blocks(*given: Any) -> tuple[dict[str, int], dict[str, int]]:
        if setting is None:
            found: tuple[dict[str, int], dict[str, int]] = usual(*given)
            return found
        high, wide, deep, warps, stages = setting
        return {"BLOCK_O": high, "BLOCK_N": wide, "BLOCK_K": deep}, {"num_warps": warps, "num_stages": stages}

    def call(x: Tensor, g: Tensor) -> Tensor:
        weight_gradients.weight_gradients(x, g, rows, [stride] * 2, [1, 1], [1, 1], exact=True)
        return rows

    calls: Calls = [lambda x=x, g=g: call(x, g) for x, g in zip(xs, gs, strict=True)]  # type: ignore[misc]
    return mock.patch.object(weight_gradients, "blocks", blocks), calls


def norms(layer: Layer, _: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Forward and backward with shortcut and ReLU; a setting is (factor of the rows per block, programs, warps)."""
    channels, height, clients, records = layer[1], *layer[3:]
    sets = list(zip(*(images(clients * records, channels, height) for _ in range(3)), strict=True))
    weight, bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    running = torch.zeros(clients, channels, device="cuda"), torch.ones(clients, channels, device="cuda")
    by_weight, by_bias = torch.empty(2, clients, channels, device="cuda")
    usual = batch_norm._grid

    def grid(count: int, P: int, C: int) -> Any:
        shape, span, blocks = usual(count, P, C)
        if setting is not None:
            times, many, warps = setting
            tall, splits = times * blocks["BLOCK_P"], 1
            while splits < 64 and count * shape[2] * splits < many and 2 * splits * tall < P:
                splits *= 2
            span = _ceiling(_ceiling(P, splits), tall) * tall
            shape = (count, splits, shape[2])
            blocks |= {"BLOCK_P": tall, "SPLITS": splits, "num_warps": warps}
        return shape, span, blocks

    def call(x: Tensor, shortcut: Tensor, g: Tensor) -> Tensor:
        y, mean, inverse = batch_norm.forward(x, weight, bias, running, clients, 0.1, 1e-5, True, shortcut)
        return batch_norm.backward(g, x, weight, bias, mean, inverse, by_weight, by_bias, True, y)[0]

    calls: Calls = [lambda given=given: call(*given) for given in sets]  # type: ignore[misc]
    return mock.patch.object(batch_norm, "_grid", grid), calls


def pooled_norms(layer: Layer, way: str, setting: Setting | None) -> tuple[Any, Calls]:
    """GroupNorm with ReLU and pooling; a setting is (parts, numbers per thread)."""
    channels, height, clients, records = layer[1], *layer[3:]
    xs, gs = (images(clients * records, channels, side) for side in (height, height // 2))
    weight, bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    usual = group_norm_pool._block

    def block(squares: int, channels: int, towards: str) -> dict[str, int]:
        if setting is None or towards != way:
            found: dict[str, int] = usual(squares, channels, towards)
            return found
        rows = tiles.power(_ceiling(squares, setting[0]))
        return {"BLOCK": rows, "num_warps": max(1, min(32, 4 * rows * channels // (32 * setting[1])))}

    def forward(x: Tensor) -> Tensor:
        y: Tensor = group_norm_pool.forward(x, 8, weight, bias, 1e-5)[0]
        return y

    means = [group_norm_pool.forward(x, 8, weight, bias, 1e-5)[1:] for x in xs] if way == "backward" else []
    calls: Calls = [lambda x=x: forward(x) for x in xs]  # type: ignore[misc]
    if way == "backward":
        calls = [
            lambda x=x, g=g, given=given: group_norm_pool.backward(g, x, 8, weight, bias, *given)[0]  # type: ignore[misc]
            for x, g, given in zip(xs, gs, means, strict=True)
        ]
    return mock.patch.object(group_norm_pool, "_block", block), calls


KINDS: dict[str, tuple[Callable[..., tuple[Any, Calls]], tuple[str, ...], list[Setting]]] = {
    "sweep": (
        sweeps,
        ("forward", "backward"),
        [*itertools.product((64, 128), (2, 4, 8, 16), (4,), (3,)), *itertools.product((64,), (4, 8), (4,), (2, 4))],
    ),
    "convolution": (
        convolutions,
        ("forward", "backward"),
        list(itertools.product((64, 128, 256), (64, 128), (4, 8))),
    ),
    "weight gradients": (
        gradients,
        ("",),
        [
            *itertools.product((4,), (32, 64), (132, 264, 396), (4, 8), (2, 3)),
            *itertools.product((1, 2), (32, 64), (264,), (4, 8), (3,)),
        ],
    ),
    "many channels": (
        many_channels,
        ("",),
        [
            *itertools.product((64,), (64, 128), (64, 128), (4,), (2, 3, 4)),
            *itertools.product((128,), (64, 128, 256), (32, 64), (4, 8), (3, 4)),
        ],
    ),
    "pooled norm": (pooled_norms, ("forward",), [(1, 16), (1, 32), (1, 64)]),
    "pooled norm back": (pooled_norms, ("backward",), list(itertools.product((1, 2, 4), (16, 32, 64)))),
    "norm": (norms, ("",), list(itertools.product((1, 2), (512, 2048), (4, 8)))),
}


def timed(kind: str, layer: Layer, way: str, setting: Setting | None) -> tuple[float, Tensor]:
    """Microseconds per call, as the median of five runs of the graph, and the first result."""
    torch.manual_seed(0)
    patch, calls = KINDS[kind][0](layer, way, setting)
    with patch:
        found = calls[0]().clone()
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                for call in calls:
                    call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (REPEATS * SETS))
    return sorted(times[2:])[2], found


def cells(names: Sequence[str] = ()) -> Iterator[tuple[str, Layer, str]]:
    """The kernels and layers of the named networks (default: ResNet20) and kinds (default: all)."""
    for name in names:
        one_of((*NETWORKS, *KINDS), network_or_kind=name)
    networks = [name for name in names if name in NETWORKS] or ["resnet20"]
    kinds = [name for name in names if name not in NETWORKS] or list(KINDS)
    normed = {"norm": "resnet20", "pooled norm": "cnn-gn", "pooled norm back": "cnn-gn"}
    for network, kind in itertools.product(networks, kinds):
        for layer, way in itertools.product(NETWORKS[network], KINDS[kind][1]):
            convolved = kind in ("sweep", "convolution")
            tiled = convolved or kind == "weight gradients"
            if (tiled or kind == "many channels") and tiled != (max(layer[:2]) <= tiles.MOST):
                continue
            if normed.get(kind, network) != network or (convolved and is_swept(layer, way) != (kind == "sweep")):
                continue
            if convolved and way == "backward" and layer[0] <= 3:  # the inputs of the first layer need no gradient
                continue
            yield kind, layer, way


def main(seconds: float, names: Sequence[str] = ()) -> None:
    end = time.monotonic() + seconds
    for kind, layer, way in cells(names):
        now, expected = timed(kind, layer, way, None)
        tried: list[tuple[float, Setting]] = []
        for setting in KINDS[kind][2]:
            if time.monotonic() > end:
                break
            if kind == "weight gradients" and layer[4] > setting[2] != 264:  # more clients than programs
                continue
            try:
                took, found = timed(kind, layer, way, setting)
            except Exception as error:  # for example too much shared memory
                print(f"  {setting}: {repr(error)[:90]}")
                continue
            off = float((found.float() - expected.float()).norm() / expected.float().norm())
            tried.append((took if off < 0.02 else math.inf, setting))
        best = ", ".join(f"{took:.1f} {setting}" for took, setting in sorted(tried)[:3])
        print(f"{kind} {way} {layer}: now {now:.1f} us; best {best}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    limit = float(given.pop(0)) if given and given[0].replace(".", "", 1).isdigit() else math.inf
    main(limit, given)
