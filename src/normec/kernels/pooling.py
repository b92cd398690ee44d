"""The largest of every window of channels-last images, 2×2 pixels or as many as it takes, and the way back.

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
def better(value, best, place, best_place, real):
    """The larger of two so far, and its place."""
    take = real & ((value > best) | (value != value))
    return tl.where(take, value, best), tl.where(take, place, best_place)


@triton.jit
def _largest(x, at, here, right, below, both, W, C: tl.constexpr):
    best = tl.load(x + at, mask=here, other=0.0)
    place = tl.zeros_like(at)
    best, place = better(tl.load(x + at + C, mask=right, other=0.0), best, 1, place, right)
    best, place = better(tl.load(x + at + W * C, mask=below, other=0.0), best, 2, place, below)
    best, place = better(tl.load(x + at + W * C + C, mask=both, other=0.0), best, 3, place, both)
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


@triton.jit
def _adapt(
    x, y, places, size, H, W, OH, OW,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`DOWN` and `ACROSS`: of the largest window. A place is counted in rows of `ACROSS`."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of y
    square, here = e // C, e < size
    j, i, image = square % OW, square // OW % OH, square // (OW * OH)
    top, left = i * H // OH, j * W // OW
    down, across = ((i + 1) * H + OH - 1) // OH - top, ((j + 1) * W + OW - 1) // OW - left
    at = ((image * H + top) * W + left) * C + e % C
    best = tl.load(x + at, mask=here, other=0.0)
    place = tl.zeros_like(e)
    for k in tl.static_range(1, DOWN * ACROSS):
        real = here & (k // ACROSS < down) & (k % ACROSS < across)
        value = tl.load(x + at + (k // ACROSS * W + k % ACROSS) * C, mask=real, other=0.0)
        best, place = better(value, best, k, place, real)
    tl.store(y + e, best, mask=here)
    tl.store(places + e, place.to(tl.uint8), mask=here)


@triton.jit
def _adapt_back(g, places, dx, size, H, W, OH, OW, ACROSS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Every number of x gathers the slopes of those windows, at most two each way, of which it was the largest."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel, here = e // C, e < size
    w, h, image = pixel % W, pixel // W % H, pixel // (W * H)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(4):
        i, j = h * OH // H + k // 2, w * OW // W + k % 2
        top, left = i * H // OH, j * W // OW
        inside = here & (i < OH) & (j < OW) & (top <= h) & (left <= w)
        at = ((image * OH + i) * OW + j) * C + e % C
        place = tl.load(places + at, mask=inside, other=0).to(tl.int32)
        mine = inside & (place == (h - top) * ACROSS + w - left)
        total += tl.load(g + at, mask=mine, other=0.0).to(tl.float32)
    tl.store(dx + e, total.to(dx.dtype.element_ty), mask=here)


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


def largest_window(height: int, width: int, down: int, across: int) -> tuple[int, int]:
    """Rows and columns of the largest window where an image is cut into `down` times `across` of them."""
    rows = max(-(-(i + 1) * height // down) - i * height // down for i in range(down))
    return rows, max(-(-(j + 1) * width // across) - j * width // across for j in range(across))


def adapt(x: Tensor, down: int, across: int) -> tuple[Tensor, Tensor]:
    """As `F.adaptive_max_pool2d(x, (down, across))`, which are no more than x has; and where each lay."""
    images, C, H, W = x.shape
    y = blank((images, C, down, across), x)
    places = blank(tuple(y.shape), x, torch.uint8)
    rows, columns = largest_window(H, W, down, across)
    _adapt[(triton.cdiv(y.numel(), _BLOCK),)](
        x, y, places, y.numel(), H, W, down, across, DOWN=rows, ACROSS=columns, C=C, BLOCK=_BLOCK
    )
    return y, places


def adapt_back(g: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The slope of x, of this shape, from that of `adapt(x)`."""
    (_, C, H, W), (down, across) = shape, places.shape[2:]
    dx = blank(shape, g)
    _adapt_back[(triton.cdiv(dx.numel(), _BLOCK),)](
        g, places, dx, dx.numel(), H, W, down, across, ACROSS=largest_window(H, W, down, across)[1], C=C, BLOCK=_BLOCK
    )
    return dx
