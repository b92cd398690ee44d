"""What the kernels of 3×3 convolutions and norms take on a GPU at ResNet20's shapes, by setting: how those are chosen.

    python -m normec.bench.kernels [SECONDS [KIND …]]

Ten clients, 32 images each, bfloat16. Every setting's result is held against the present one's; a wrong one counts as
infinitely slow.
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

from ..kernels import batch_norm, convolution, sweep, tiles, weight_gradients

CLIENTS, RECORDS = 10, 32
LAYERS = [(3, 16, 1, 32), (16, 16, 1, 32), (16, 32, 2, 32), (32, 32, 1, 16), (32, 64, 2, 16), (64, 64, 1, 8)]
REPEATS, SETS = 5, 3  # calls in a graph, over so many sets of images

Setting = tuple[Any, ...]
Calls = list[Callable[[], Tensor]]


def _ceiling(number: int, by: int) -> int:
    return -(-number // by)


def images(channels: int, height: int) -> list[Tensor]:
    shape = (CLIENTS * RECORDS, channels, height, height)
    return [convolution.widened(torch.randn(shape, device="cuda"), torch.bfloat16) for _ in range(SETS)]


def is_swept(layer: tuple[int, ...], way: str) -> bool:
    cut, size = getattr(tiles, way)(*layer[:3]), tiles.size((layer[3], layer[3]), layer[2])
    return sweep.settings(cut, CLIENTS * RECORDS, (layer[3], layer[3]), size) is not None


def sweeps(layer: tuple[int, ...], way: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Setting: tiles a program, rows, warps, stages."""
    usual = sweep.settings

    def settings(*given: Any) -> Any:
        found = usual(*given)
        if found is None or setting is None:
            return found
        meta, _, _ = found
        count, strip, warps, stages = setting
        grid = (_ceiling(CLIENTS * RECORDS * meta["ACROSS"], count), _ceiling(meta["H"], strip))
        return meta | {"TILES": count, "STRIP": strip}, grid, {"num_warps": warps, "num_stages": stages}

    return mock.patch.object(sweep, "settings", settings), convolutions(layer, way, None)[1]


def convolutions(layer: tuple[int, ...], way: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Setting: tiles a program, columns, warps."""
    inputs, outputs, stride, height = layer
    cut = getattr(tiles, way)(inputs, outputs, stride)
    small = tiles.size((height, height), stride)
    source = images(inputs, height) if way == "forward" else images(outputs, small[0])
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


def gradients(layer: tuple[int, ...], _: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Setting: tiles a step, programs in all, warps, stages."""
    inputs, outputs, stride, height = layer
    xs, gs = images(inputs, height), images(outputs, tiles.size((height, height), stride)[0])
    rows = torch.empty(CLIENTS, outputs, inputs, 3, 3, device="cuda")
    usual = weight_gradients.settings

    def settings(cut: tiles.Tiles, clients: int, count: int, *given: Any) -> Any:
        meta, grid, options = usual(cut, clients, count, *given)
        if setting is not None:
            block, programs, warps, stages = setting
            steps = _ceiling(count * meta["GH"] * meta["GW"], block)
            splits = max(1, min(64, steps // 2, programs // (clients * grid[1])))
            meta |= {"BLOCK_K": block, "SPLITS": splits}
            grid, options = (clients * splits, grid[1]), {"num_warps": warps, "num_stages": stages}
        return meta, grid, options

    def call(x: Tensor, g: Tensor) -> Tensor:
        weight_gradients.of_tiles(x, g, rows, stride)
        return rows

    calls: Calls = [lambda x=x, g=g: call(x, g) for x, g in zip(xs, gs, strict=True)]  # type: ignore[misc]
    return mock.patch.object(weight_gradients, "settings", settings), calls


def norms(layer: tuple[int, ...], _: str, setting: Setting | None) -> tuple[Any, Calls]:
    """Forward and backward with shortcut and ReLU. Setting: times the usual rows a block, programs, warps."""
    channels, height = layer[1], layer[3]
    sets = list(zip(*(images(channels, height) for _ in range(3)), strict=True))
    weight, bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    running = torch.zeros(CLIENTS, channels, device="cuda"), torch.ones(CLIENTS, channels, device="cuda")
    by_weight, by_bias = torch.empty(2, CLIENTS, channels, device="cuda")
    usual = batch_norm._grid

    def grid(clients: int, P: int, C: int) -> Any:
        shape, span, blocks = usual(clients, P, C)
        if setting is not None:
            times, many, warps = setting
            tall, splits = times * blocks["BLOCK_P"], 1
            while splits < 64 and clients * shape[2] * splits < many and 2 * splits * tall < P:
                splits *= 2
            span = _ceiling(_ceiling(P, splits), tall) * tall
            shape = (clients, splits, shape[2])
            blocks |= {"BLOCK_P": tall, "SPLITS": splits, "num_warps": warps}
        return shape, span, blocks

    def call(x: Tensor, shortcut: Tensor, g: Tensor) -> Tensor:
        y, mean, inverse = batch_norm.forward(x, weight, bias, running, CLIENTS, 0.1, 1e-5, True, shortcut)
        return batch_norm.backward(g, x, weight, bias, mean, inverse, by_weight, by_bias, True, y)[0]

    calls: Calls = [lambda given=given: call(*given) for given in sets]  # type: ignore[misc]
    return mock.patch.object(batch_norm, "_grid", grid), calls


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
    "weight gradients": (gradients, ("",), list(itertools.product((32, 64), (132, 264, 396), (4, 8), (2, 3)))),
    "norm": (norms, ("",), list(itertools.product((1, 2), (512, 2048), (4, 8)))),
}


def timed(kind: str, layer: tuple[int, ...], way: str, setting: Setting | None) -> tuple[float, Tensor]:
    """Microseconds a call, the median of five replays, and the first result."""
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


def cells(kinds: Sequence[str] = ()) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for kind in kinds or KINDS:
        ways = KINDS[kind][1]
        for layer, way in itertools.product(LAYERS, ways):
            if way == "backward" and layer[0] == 3:  # the first layer's images need no gradient
                continue
            if kind not in ("sweep", "convolution") or is_swept(layer, way) == (kind == "sweep"):
                yield kind, layer, way


def main(seconds: float, kinds: Sequence[str] = ()) -> None:
    end = time.monotonic() + seconds
    for kind, layer, way in cells(kinds):
        now, expected = timed(kind, layer, way, None)
        tried: list[tuple[float, Setting]] = []
        for setting in KINDS[kind][2]:
            if time.monotonic() > end:
                break
            try:
                took, found = timed(kind, layer, way, setting)
            except Exception as error:  # too much shared memory, say
                print(f"  {setting}: {str(error).splitlines()[0][:90]}")
                continue
            off = float((found.float() - expected.float()).norm() / expected.float().norm())
            tried.append((took if off < 0.02 else math.inf, setting))
        best = ", ".join(f"{took:.1f} {setting}" for took, setting in sorted(tried)[:3])
        print(f"{kind} {way} {layer}: now {now:.1f} us; best {best}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else math.inf, sys.argv[2:])
