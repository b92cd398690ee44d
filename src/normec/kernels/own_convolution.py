"""A 2D convolution in which every client has weights of its own: forward, and the gradient of the input.

PyTorch makes a grouped convolution of it, which is the definition. For a few channels per group cuDNN has no fast
kernels.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank, pointer

Moves = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding and dilation, (down, right) each


@triton.jit
def _convolve(
    source, weights, bias, out, B, H, W, OH, OW, CI, CO, SH, SW, PH, PW, DH, DW, KW, TAPS,
    BACK: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply the windows of `BLOCK_M` pixels of one client's output by `BLOCK_N` columns of its weights.

    `WHOLE`: a step of `BLOCK_K` has channels of a single tap.
    """
    client = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # a pixel of the output
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # a channel of the output
    real, image, h, w = p < B * OH * OW, p // (OH * OW), p // OW % OH, p % OW
    own_source = source + client * B * H * W * CI
    own_weights = weights + client * CO * TAPS * CI
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, TAPS * CI, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)  # a tap and a channel of the source
        tap = tl.full((1,), start // CI, tl.int32) if WHOLE else k // CI
        down, right = tap // KW * DH, tap % KW * DW
        if BACK:  # the outputs of the convolution that this pixel of its input has gone into
            y, z = h[:, None] + PH - down[None, :], w[:, None] + PW - right[None, :]
            inside = (y % SH == 0) & (z % SW == 0) & (y >= 0) & (z >= 0)
            y, z = y // SH, z // SW
        else:
            y, z = h[:, None] * SH - PH + down[None, :], w[:, None] * SW - PW + right[None, :]
            inside = (y >= 0) & (z >= 0)
        inside = inside & (y < H) & (z < W) & real[:, None] & (k < TAPS * CI)[None, :]
        at = ((image[:, None] * H + y) * W + z) * CI + (k % CI)[None, :]
        value = tl.load(own_source + at, mask=inside, other=0.0)
        held = (k < TAPS * CI)[:, None] & (n < CO)[None, :]
        weight = tl.load(own_weights + n[None, :] * (TAPS * CI) + k[:, None], mask=held, other=0.0)
        found = tl.dot(value, weight, found, input_precision=PRECISION)
    if BIAS:
        found += tl.load(bias + client * CO + n, mask=n < CO, other=0.0).to(tl.float32)[None, :]
    at = client * B * OH * OW * CO + p[:, None] * CO + n[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=real[:, None] & (n < CO)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, moves: Moves) -> Tensor:
    """Return images ``[c · B, CO, ·, ·]`` from channels-last x, weights ``[c, CO, CI, KH, KW]``, biases ``[c, CO]``."""
    kernel = weight.shape[3:]
    size = tuple(
        (seen + 2 * padding - dilation * (width - 1) - 1) // stride + 1
        for seen, width, stride, padding, dilation in zip(x.shape[2:], kernel, *moves, strict=True)
    )
    return _launch(
        x, weight.permute(0, 1, 3, 4, 2), None if bias is None else bias.contiguous(), moves, size, back=False
    )


def input_gradient(g: Tensor, weight: Tensor, moves: Moves, size: tuple[int, int]) -> Tensor:
    """Return the gradient of an input of this size, from the output's channels-last gradient."""
    return _launch(g, weight.permute(0, 2, 3, 4, 1), None, moves, size, back=True)


def _launch(
    source: Tensor, weights: Tensor, bias: Tensor | None, moves: Moves, size: tuple[int, int], *, back: bool
) -> Tensor:
    """Return the images that the kernel writes; weights are ``[c, output channels, KH, KW, source channels]``."""
    clients, writes, rows, columns, reads = weights.shape
    out = blank((len(source), writes, *size), source)
    each = len(source) // clients
    sizes = blocks(reads, writes, rows * columns, source.dtype == torch.float32)
    grid = (
        triton.cdiv(each * size[0] * size[1], sizes["BLOCK_M"]),
        clients,
        triton.cdiv(writes, sizes["BLOCK_N"]),
    )
    exact = source.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    _convolve[grid](
        source, weights.contiguous(), pointer(bias, source), out,
        each, *source.shape[2:], *size, reads, writes, *chain(*moves), columns, rows * columns,
        BACK=back, BIAS=bias is not None, PRECISION="ieee" if exact else "tf32", **sizes, num_warps=4,
    )  # fmt: skip
    return out


def blocks(reads: int, writes: int, taps: int, single: bool) -> dict[str, int]:
    """Return the kernel's blocks, from sizes alone; `single` says whether numbers have single or half precision."""
    most = 32 if single else 64
    whole = [size for size in (64, 32, 16) if size <= most and reads % size == 0]  # channels of a single tap
    deep = whole[0] if whole else min(most, max(16, triton.next_power_of_2(taps * reads)))
    wide = min(64, max(16, triton.next_power_of_2(writes)))
    return {"WHOLE": bool(whole), "BLOCK_M": 128, "BLOCK_N": wide, "BLOCK_K": deep}
