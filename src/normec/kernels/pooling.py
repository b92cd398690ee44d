"""The largest of every 2×2 pixels of channels-last images, and the way back, one pass each.

PyTorch's own are the definition: the first of equal numbers gets the slope, and NaN is larger than any number.
"""

# mypy: ignore-errors
# (Triton's kernels are a language of their own inside Python)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank

_BLOCK = 1024


@triton.jit
def _window(e, size, H, W, DOWN, ACROSS, C: tl.constexpr):
    """Where the first pixel of number e's square lies in x, and what of the square's second row and column exists."""
    c, square = e % C, e // C
    w, h, image = square % ACROSS * 2, square // ACROSS % DOWN * 2, square // (ACROSS * DOWN)
    at = ((image * H + h) * W + w) * C + c
    here = e < size
    return at, here, here & (w + 1 < W), here & (h + 1 < H), here & (w + 1 < W) & (h + 1 < H)


@triton.jit
def _better(value, best, place, best_place, real):
    """The larger of two so far, and its place."""
    take = real & ((value > best) | (value != value))
    return tl.where(take, value, best), tl.where(take, place, best_place)


@triton.jit
def _largest(x, at, here, right, below, both, W, C: tl.constexpr):
    best = tl.load(x + at, mask=here, other=0.0)
    place = tl.zeros_like(at)
    best, place = _better(tl.load(x + at + C, mask=right, other=0.0), best, 1, place, right)
    best, place = _better(tl.load(x + at + W * C, mask=below, other=0.0), best, 2, place, below)
    best, place = _better(tl.load(x + at + W * C + C, mask=both, other=0.0), best, 3, place, both)
    return best, place


@triton.jit
def _pool(x, y, size, H, W, OH, OW, C: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of y
    at, here, right, below, both = _window(e, size, H, W, OH, OW, C)
    best, _ = _largest(x, at, here, right, below, both, W, C)
    tl.store(y + e, best, mask=here)


@triton.jit
def _unpool(g, x, dx, size, H, W, OH, OW, DOWN, ACROSS, C: tl.constexpr, BLOCK: tl.constexpr):
    """Squares that are cut off by the border had no part in y: their slope is zero."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, here, right, below, both = _window(e, size, H, W, DOWN, ACROSS, C)
    _, place = _largest(x, at, here, right, below, both, W, C)
    square = e // C
    w, h, image = square % ACROSS, square // ACROSS % DOWN, square // (ACROSS * DOWN)
    slope = tl.load(g + ((image * OH + h) * OW + w) * C + e % C, mask=here & (h < OH) & (w < OW), other=0.0)
    tl.store(dx + at, tl.where(place == 0, slope, 0.0), mask=here)
    tl.store(dx + at + C, tl.where(place == 1, slope, 0.0), mask=right)
    tl.store(dx + at + W * C, tl.where(place == 2, slope, 0.0), mask=below)
    tl.store(dx + at + W * C + C, tl.where(place == 3, slope, 0.0), mask=both)


def pool(x: Tensor) -> Tensor:
    """As `F.max_pool2d(x, 2)`."""
    images, C, H, W = x.shape
    y = blank((images, C, H // 2, W // 2), x)
    _pool[(triton.cdiv(y.numel(), _BLOCK),)](x, y, y.numel(), H, W, H // 2, W // 2, C=C, BLOCK=_BLOCK)
    return y


def unpool(g: Tensor, x: Tensor) -> Tensor:
    """The slope of x from that of `pool(x)`."""
    images, C, H, W = x.shape
    dx, down, across = torch.empty_like(x), -(-H // 2), -(-W // 2)
    size = images * C * down * across
    _unpool[(triton.cdiv(size, _BLOCK),)](g, x, dx, size, H, W, H // 2, W // 2, down, across, C=C, BLOCK=_BLOCK)
    return dx
