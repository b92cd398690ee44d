"""Triton's kernels compile for an H200 at the sizes of ResNet20, without one: matrix units, wide loads, no spills."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from normec.kernels import tiles

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

CLIENTS, RECORDS = 10, 32
LAYERS = [(3, 16, 1, 32), (16, 16, 1, 32), (16, 32, 2, 32), (32, 32, 1, 16), (32, 64, 2, 16), (64, 64, 1, 8)]
MOST_SHARED = 227 * 1024  # bytes of a block's shared memory on Hopper


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> Any:
    """The kernel for compute capability 9.0; pointers and sizes as the launcher finds them, multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    wide = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] in ("i32", *POINTERS)}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=wide)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


POINTERS = ("*bf16", "*fp32", "*i32")


def resources(binary: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit into them."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


def fits_well(binary: Any, folder: Path) -> None:
    registers, spilled = resources(binary, folder)
    assert spilled == 0
    assert registers * 32 * binary.metadata.num_warps <= 65536
    assert binary.metadata.shared <= MOST_SHARED


@pytest.mark.parametrize("layer", LAYERS)
def test_convolutions(layer: tuple[int, int, int, int], tmp_path: Path) -> None:
    from normec.kernels import convolution

    inputs, outputs, stride, large = layer
    small = large // stride
    ways = [(tiles.forward(inputs, outputs, stride), large, small)]
    if inputs > 3:  # images need no gradient
        ways.append((tiles.backward(inputs, outputs, stride), small, large))
    for way, seen, size in ways:
        constants, _, options = convolution.settings(way, CLIENTS * RECORDS, (seen, seen), (size, size))
        types = {"source": "*bf16", "weights": "*bf16", "out": "*bf16", "count": "i32"}
        binary = compiled(convolution._convolve, types, constants, options)
        fits_well(binary, tmp_path)
        assert "wgmma" in binary.asm["ptx"]
        if inputs > 3:
            assert "ld.global.v4" in binary.asm["ptx"]


@pytest.mark.parametrize("layer", LAYERS)
def test_weight_gradients(layer: tuple[int, int, int, int], tmp_path: Path) -> None:
    from normec.kernels import weight_gradients

    inputs, outputs, stride, large = layer
    small, way = large // stride, tiles.gathering(inputs, outputs, stride)
    constants, _, options = weight_gradients.settings(way, CLIENTS, RECORDS, (large, large), (small, small))
    types = {"x": "*bf16", "g": "*bf16", "part": "*fp32", "count": "i32", "span": "i32"}
    binary = compiled(weight_gradients._tiles, types, constants, options)
    fits_well(binary, tmp_path)
    assert "wgmma" in binary.asm["ptx"]


@pytest.mark.parametrize("shortcut", [False, True])
def test_norms_with_relu(shortcut: bool, tmp_path: Path) -> None:
    from normec.kernels import batch_norm, group_norm

    pixels, channels = RECORDS * 32 * 32, 16
    _, _, blocks = batch_norm._grid(CLIENTS, pixels, channels)
    constants = {"AFFINE": True, "RELU": True, "SHORTCUT": shortcut, "RUNNING": True} | blocks
    alone = {"AFFINE": True, "RELU": True, "SHORTCUT": shortcut, "G": 8, "C": 16, "BLOCK_P": group_norm._tall(16)}
    for kernel, given in (
        (batch_norm._normalise, constants),
        (batch_norm._slopes, constants),
        (batch_norm._apply, constants),
        (group_norm._forward, alone),
        (group_norm._backward, alone),
    ):
        names = [name for name in kernel.arg_names if name not in given]
        images = ("x", "y", "g", "dx", "shortcut", "passed")
        numbers = {"P": "i32", "span": "i32", "weight_stride": "i32", "bias_stride": "i32"}
        numbers |= {"C": "i32", "momentum": "fp32", "eps": "fp32"}
        types = {name: "*bf16" if name in images else numbers.get(name, "*fp32") for name in names}
        used = {name: value for name, value in given.items() if name in kernel.arg_names}
        binary = compiled(kernel, types, used, {})
        fits_well(binary, tmp_path)
        assert "ld.global.v4" in binary.asm["ptx"]
