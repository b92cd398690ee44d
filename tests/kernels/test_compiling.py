"""Triton's kernels compile for an H200, without one, at the sizes of runs: matrix units, wide loads, no spills."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.shapes import NETWORKS
from normec.kernels import tiles

from ..support.waiting import LIMIT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and "NORMEC_KERNELS" not in os.environ,  # make test-kernels wants it
    reason="Triton is not installed",
)

LAYERS = [layer for layers in NETWORKS.values() for layer in layers if max(layer[:2]) <= tiles.MOST]
IMAGES = {"x", "y", "g", "dx", "shortcut", "passed", "also", "source", "weights", "out", "wide"}
NUMBERS = {
    "count",
    "span",
    "images",
    "size",
    "pixels",
    "row_stride",
    "depth",
    "P",
    "W",
    "SQUARES",
    "C",
    "weight_stride",
    "bias_stride",
    "each",
    "parts",
    *("B", "H", "OH", "OW", "HO", "WO", "stride", "CI", "CO", "SH", "SW", "PH", "PW", "DH", "DW", "KW", "TAPS"),
}
MOST_SHARED = 227 * 1024  # bytes of a block's shared memory on Hopper


def compiled(
    kernel: Any, constants: dict[str, Any], options: dict[str, int], folder: Path, types: dict[str, str] | None = None
) -> str:
    """The PTX for compute capability 9.0, of which nothing spills; pointers and sizes as multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else (types or {}).get(name, _type(name)) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = resources(binary, folder)
    assert spilled == 0
    assert registers * 32 * binary.metadata.num_warps <= 65536
    assert binary.metadata.shared <= MOST_SHARED
    text: str = binary.asm["ptx"]
    return text


def _type(name: str) -> str:
    if name in NUMBERS:
        return "i32"
    return (
        "*bf16"
        if name in IMAGES
        else "*u8"
        if name == "indices"
        else "fp32"
        if name in ("eps", "momentum")
        else "*fp32"
    )


def resources(binary: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit into them."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


def number_by_number(ptx: str) -> bool:
    """Whether images, or indices into them, are loaded in pieces of one or two bytes."""
    return re.search(r"ld\.global[.\w:]*\.b(8|16)\b", ptx) is not None


@pytest.mark.parametrize("layer", LAYERS)
def test_convolutions(layer: tuple[int, ...], tmp_path: Path) -> None:
    from normec.kernels import convolution, sweep

    inputs, outputs, stride, large, clients, records = layer
    small, images = large // stride, clients * records
    ways = [(tiles.forward(inputs, outputs, stride), large, small)]
    if inputs > 3:  # images need no gradient
        ways.append((tiles.backward(inputs, outputs, stride), small, large))
    for way, seen, size in ways:
        kinds = [(convolution._convolve, convolution.settings(way, images, (seen, seen), (size, size)))]
        swept = sweep.settings(way, images, (seen, seen), (size, size))
        if swept is not None:
            kinds.append((sweep.sweep, swept))
        for (kernel, (constants, _, options)), moments in itertools.product(kinds, (False, True)):
            ptx = compiled(kernel, {"BIAS": False, "MOMENTS": moments} | constants, options, tmp_path)
            assert "wgmma" in ptx
            assert not number_by_number(ptx)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_that_are_filled_up(channels: int, tmp_path: Path) -> None:
    from normec.kernels import convolution

    for name in ("x", "source"):  # a float32 image, and one in half precision
        ptx = compiled(convolution._widen, {"C": channels, "PITCH": 4, "BLOCK": 1024}, {}, tmp_path, {"x": _type(name)})
        assert "st.global.v2" in ptx


@pytest.mark.parametrize("layer", LAYERS)
def test_weight_gradients(layer: tuple[int, ...], tmp_path: Path) -> None:
    from normec.kernels import weight_gradients

    inputs, outputs, stride, large, clients, records = layer
    small, way = large // stride, tiles.gathering(inputs, outputs, stride, records * (large // stride) ** 2)
    constants, _, options = weight_gradients.settings(way, clients, records, (large, large), (small, small))
    ptx = compiled(weight_gradients._tiles, constants, options, tmp_path)
    assert "wgmma" in ptx
    assert "cp.async" in ptx  # loaded ahead
    assert not number_by_number(ptx)
    collected = {key: constants[key] for key in weight_gradients.COLLECTED} | {"READS": inputs, "STRIDE": stride}
    blocks = weight_gradients.collecting(constants["SPLITS"], way.padded_writes)
    compiled(weight_gradients._collect, collected | blocks, {}, tmp_path)


@pytest.mark.parametrize("outputs", [64, 512])
def test_weight_gradients_of_many_channels(outputs: int, tmp_path: Path) -> None:
    """In half precision, to which float32 inputs are rounded."""
    from normec.kernels import weight_gradients

    sizes, options = weight_gradients.blocks(outputs, 9 * outputs, half=True)
    for kind in ("*fp16", "*bf16"):
        ptx = compiled(
            weight_gradients._weights, {"SPLITS": 2, **sizes}, options, tmp_path, dict.fromkeys(("x", "g"), kind)
        )
        assert "wgmma" in ptx
        assert not number_by_number(ptx)
    types = {"x": "*fp32", "out": "*fp16"}
    assert not number_by_number(compiled(weight_gradients._round, {"BLOCK": 2048}, {}, tmp_path, types))
    for scaled in (False, True):
        compiled(weight_gradients._gather, {"SPLITS": 2, "SCALED": scaled, "BLOCK": 1024}, {}, tmp_path)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 32), (32, 64), (64, 64)])
def test_convolutions_of_clients_with_weights_of_their_own(
    inputs: int, outputs: int, single: bool, tmp_path: Path
) -> None:
    from normec.kernels import own_convolution

    kind = dict.fromkeys(("source", "weights", "bias", "out"), "*fp32" if single else "*bf16")
    for back, (reads, writes) in enumerate(((inputs, outputs), (outputs, inputs))):
        constants = {"BACK": bool(back), "BIAS": not back, "PRECISION": "tf32"}
        constants |= own_convolution.blocks(reads, writes, 9, single)
        ptx = compiled(own_convolution._convolve, constants, {"num_warps": 4}, tmp_path, kind)
        assert "mma" in ptx
        assert not number_by_number(ptx)


@pytest.mark.parametrize("shortcut", [False, True])
def test_norms_with_relu(shortcut: bool, tmp_path: Path) -> None:
    from normec.kernels import batch_norm, group_norm

    asked = {"AFFINE": True, "RELU": True, "SHORTCUT": shortcut, "ALSO": False, "RUNNING": True}
    _, _, blocks = batch_norm._grid(10, 32 * 32 * 32, 16)
    for kernel in (batch_norm._normalise, batch_norm._slopes, batch_norm._apply):
        warps = {key: value for key, value in blocks.items() if key == "num_warps"}
        assert "ld.global.v4" in compiled(kernel, asked | blocks, warps, tmp_path)
    for channels, pixels in ((16, 32 * 32), (64, 8 * 8), (64, 32 * 32)):
        whole, sizes = group_norm._blocks(pixels, channels)
        kernels = (group_norm._forward_whole, group_norm._backward_whole)
        if not whole:
            kernels = (group_norm._forward, group_norm._backward)
        warps = {"num_warps": sizes.pop("num_warps", 4)}
        for kernel in kernels:
            ptx = compiled(kernel, asked | sizes | {"G": 8, "C": channels}, warps, tmp_path)
            assert not number_by_number(ptx)


@pytest.mark.parametrize(("channels", "height"), [(16, 32), (32, 16), (64, 8)])
def test_norms_with_relu_and_pooling(channels: int, height: int, tmp_path: Path) -> None:
    from normec.kernels import group_norm_pool

    for kernel, way in ((group_norm_pool._forward, "forward"), (group_norm_pool._backward, "backward")):
        sizes = group_norm_pool._block(height * height // 4, channels, way)
        warps = {"num_warps": sizes.pop("num_warps")}
        constants = {"W": height, "SQUARES": height * height // 4, "AFFINE": True, "G": 8, "C": channels}
        assert not number_by_number(compiled(kernel, constants | sizes, warps, tmp_path))


def test_pooling(tmp_path: Path) -> None:
    from normec.kernels import pooling

    half = {"H": 28, "W": 28, "OH": 14, "OW": 14, "DOWN": 14, "ACROSS": 14, "C": 16, "BLOCK": pooling._BLOCK}
    adapted = {"H": 14, "W": 14, "OH": 5, "OW": 5, "DOWN": 4, "ACROSS": 4, "C": 32, "BLOCK": pooling._BLOCK}
    for kernel, sizes in (
        (pooling._pool, half),
        (pooling._unpool, half),
        (pooling._adapt, adapted),
        (pooling._adapt_back, adapted),
    ):
        assert not number_by_number(compiled(kernel, sizes, {}, tmp_path))
