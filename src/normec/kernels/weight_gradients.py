"""Weight gradients of a two-dimensional convolution, one a client: dW[o, i, tap] = Σ g[pixel, o] x[pixel at tap, i]."""

# mypy: ignore-errors
# (Triton's kernels are a language of their own inside Python)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weights(
    x, g, part, B, H, W, HO, WO, CI, CO, SH, SW, PH, PW, DH, DW, span, KW, TAPS,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gᵀ · patches over a span of one client's output pixels: [CO, TAPS · CI]; x and g are channels last."""
    client, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # a column: (tap, input channel)
    tap, i = n // CI, n % CI
    down, right = tap // KW * DH - PH, tap % KW * DW - PW
    column = (down * W + right) * CI + i
    own_g = g + client.to(tl.int64) * B * HO * WO * CO
    own_x = x + client.to(tl.int64) * B * H * W * CI
    found = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    end = tl.minimum((split + 1) * span, B * HO * WO)
    for start in range(split * span, end, BLOCK_K):
        p = start + tl.arange(0, BLOCK_K)
        q = p % (HO * WO)
        h, w = q // WO * SH, q % WO * SW
        row = (p // (HO * WO) * H * W + h * W + w) * CI
        y, z = h[:, None] + down[None, :], w[:, None] + right[None, :]
        inside = (y >= 0) & (y < H) & (z >= 0) & (z < W) & (p < end)[:, None] & (n < TAPS * CI)[None, :]
        slope = tl.load(own_g + p[:, None] * CO + o[None, :], mask=(p < end)[:, None] & (o < CO)[None, :], other=0.0)
        value = tl.load(own_x + row[:, None] + column[None, :], mask=inside, other=0.0)
        if PRECISION == "split":  # float32 as two bfloat16 each: finer than TF32, and products that need no transposing
            slope_high, value_high = slope.to(tl.bfloat16), value.to(tl.bfloat16)
            slope_low = tl.trans((slope - slope_high.to(tl.float32)).to(tl.bfloat16))
            value_low = (value - value_high.to(tl.float32)).to(tl.bfloat16)
            slope_high = tl.trans(slope_high)
            found = tl.dot(slope_low, value_high, found)
            found = tl.dot(slope_high, value_low, found)
            found = tl.dot(slope_high, value_high, found)
        else:
            found = tl.dot(tl.trans(slope), value, found, input_precision="ieee")
    at = (tl.program_id(0).to(tl.int64) * CO + o[:, None]) * TAPS * CI + n[None, :]
    tl.store(part + at, found, mask=(o < CO)[:, None] & (n < TAPS * CI)[None, :])


@triton.jit
def _gather(part, rows, stride, CI, size, TAPS, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the spans and put taps last, as the parameter has them."""
    client = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (o, tap, i) as the spans have them
    spans = (client * SPLITS + tl.arange(0, SPLITS)).to(tl.int64)
    total = tl.sum(tl.load(part + spans[:, None] * size + e[None, :], mask=(e < size)[None, :], other=0.0), 0)
    o, tap, i = e // (TAPS * CI), e // CI % TAPS, e % CI
    tl.store(rows + client.to(tl.int64) * stride + (o * CI + i) * TAPS + tap, total, mask=e < size)


def weight_gradients(
    x: Tensor, g: Tensor, rows: Tensor, stride: list[int], padding: list[int], dilation: list[int], exact: bool
) -> None:
    """Fill rows ``[clients, CO, CI, KH, KW]`` (rows contiguous, any distance apart) from channels-last x and g."""
    clients, CO, CI, KH, KW = rows.shape
    images, _, H, W = x.shape
    _, _, HO, WO = g.shape
    pixels = images // clients * HO * WO
    taps, size = KH * KW, CO * CI * KH * KW
    block_o = min(64, max(16, triton.next_power_of_2(CO)))
    block_n = min(64, max(16, triton.next_power_of_2(CI * taps)))
    half = x.dtype != rows.dtype
    block_k = 128 if half else 64
    tiles = triton.cdiv(CI * taps, block_n) * triton.cdiv(CO, block_o)
    splits = 1
    while splits < 64 and clients * tiles * splits < 1024 and pixels > 4 * splits * block_k:
        splits *= 2
    span = triton.cdiv(triton.cdiv(pixels, splits), block_k) * block_k
    part = rows.new_empty(clients * splits, CO, taps * CI)
    precision = "ieee" if exact or half else "split"  # half precisions multiply exactly as they are
    _weights[(clients * splits, triton.cdiv(CI * taps, block_n), triton.cdiv(CO, block_o))](
        x, g, part, images // clients, H, W, HO, WO, CI, CO, *stride, *padding, *dilation, span, KW, taps,
        SPLITS=splits, BLOCK_K=block_k, BLOCK_O=block_o, BLOCK_N=block_n, PRECISION=precision,
        num_warps=4, num_stages=2 if half else 3,
    )  # fmt: skip
    block = max(32, 2048 // splits)
    _gather[(clients, triton.cdiv(size, block))](part, rows, rows.stride(0), CI, size, taps, SPLITS=splits, BLOCK=block)
