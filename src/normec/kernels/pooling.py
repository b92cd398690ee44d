"""Max pooling of channels-last images, with windows of 2×2 pixels or adaptive ones, forward and backward.

PyTorch's functions are the definition: the first of equal numbers gets the gradient, and NaN is larger than any number.
The sizes are compile-time constants, because dividing by them is most of the work.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank

_BLOCK = 1024


@triton.jit
def _corner(e, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, C: tl.constexpr):
    """Return the position in x of the first pixel of the square of number e; an image has `DOWN` × `ACROSS` squares."""
    square = e // C
    w, h, image = square % ACROSS * 2, square // ACROSS % DOWN * 2, square // (ACROSS * DOWN)
    return ((image * H + h) * W + w) * C + e % C


@triton.jit
def better(value, best, index, best_index, real):
    """Return the larger of two values, and its index."""
    take = real & ((value > best) | (value != value))
    return tl.where(take, value, best), tl.where(take, index, best_index)


@triton.jit
def _pool(
    x, y, indices, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of y
    here = e < size
    at = _corner(e, H, W, OH, OW, C)
    best = tl.load(x + at, mask=here, other=0.0)
    place = tl.zeros_like(at)
    best, place = better(tl.load(x + at + C, mask=here, other=0.0), best, 1, place, here)
    best, place = better(tl.load(x + at + W * C, mask=here, other=0.0), best, 2, place, here)
    best, place = better(tl.load(x + at + W * C + C, mask=here, other=0.0), best, 3, place, here)
    tl.store(y + e, best, mask=here)
    tl.store(indices + e, place.to(tl.uint8), mask=here)


@triton.jit
def _unpool(
    g, indices, dx, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Squares that the border cuts off are not part of y; their gradient is zero."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of each square, complete or cut off
    at, here = _corner(e, H, W, DOWN, ACROSS, C), e < size
    square = e // C
    w, h, image = square % ACROSS, square // ACROSS % DOWN, square // (ACROSS * DOWN)
    own, whole = ((image * OH + h) * OW + w) * C + e % C, here & (h < OH) & (w < OW)
    place = tl.load(indices + own, mask=whole, other=0).to(tl.int32)
    slope = tl.load(g + own, mask=whole, other=0.0)
    right, below = here & (2 * w + 1 < W), here & (2 * h + 1 < H)
    tl.store(dx + at, tl.where(place == 0, slope, 0.0), mask=here)
    tl.store(dx + at + C, tl.where(place == 1, slope, 0.0), mask=right)
    tl.store(dx + at + W * C, tl.where(place == 2, slope, 0.0), mask=below)
    tl.store(dx + at + W * C + C, tl.where(place == 3, slope, 0.0), mask=right & below)


@triton.jit
def _adapt(
    x, y, indices, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`DOWN` and `ACROSS` are the sizes of the largest window; an index counts in rows of `ACROSS`."""
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
    tl.store(indices + e, place.to(tl.uint8), mask=here)


@triton.jit
def _adapt_back(
    g, indices, dx, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, ACROSS: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every number of x sums the gradients of the windows, at most two in each direction, whose maximum it was."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel, here = e // C, e < size
    w, h, image = pixel % W, pixel // W % H, pixel // (W * H)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(4):
        i, j = h * OH // H + k // 2, w * OW // W + k % 2
        top, left = i * H // OH, j * W // OW
        inside = here & (i < OH) & (j < OW) & (top <= h) & (left <= w)
        at = ((image * OH + i) * OW + j) * C + e % C
        place = tl.load(indices + at, mask=inside, other=0).to(tl.int32)
        slope = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)  # whole channels, whichever pixel is the maximum
        total += tl.where(place == (h - top) * ACROSS + w - left, slope, 0.0)
    tl.store(dx + e, total.to(dx.dtype.element_ty), mask=here)


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `F.max_pool2d(x, 2)`, and the index of each maximum in its square."""
    images, C, H, W = x.shape
    y = blank((images, C, H // 2, W // 2), x)
    indices = blank(tuple(y.shape), x, torch.uint8)
    _pool[(triton.cdiv(y.numel(), _BLOCK),)](
        x, y, indices, y.numel(), H=H, W=W, OH=H // 2, OW=W // 2, C=C, BLOCK=_BLOCK
    )  # fmt: skip
    return y, indices


def unpool(g: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of x, of this shape, from that of `pool(x)`."""
    images, C, H, W = shape
    dx, down, across = blank(shape, g), -(-H // 2), -(-W // 2)
    size = images * C * down * across
    _unpool[(triton.cdiv(size, _BLOCK),)](
        g, indices, dx, size, H=H, W=W, OH=H // 2, OW=W // 2, DOWN=down, ACROSS=across, C=C, BLOCK=_BLOCK
    )  # fmt: skip
    return dx


def largest_window(height: int, width: int, down: int, across: int) -> tuple[int, int]:
    """Return the rows and columns of the largest window if an image has `down` × `across` windows."""
    rows = max(-(-(i + 1) * height // down) - i * height // down for i in range(down))
    return rows, max(-(-(j + 1) * width // across) - j * width // across for j in range(across))


def adapt(x: Tensor, down: int, across: int) -> tuple[Tensor, Tensor]:
    """Return `F.adaptive_max_pool2d(x, (down, across))`, not larger than x, and the index of each maximum."""
    images, C, H, W = x.shape
    y = blank((images, C, down, across), x)
    indices = blank(tuple(y.shape), x, torch.uint8)
    rows, columns = largest_window(H, W, down, across)
    _adapt[(triton.cdiv(y.numel(), _BLOCK),)](
        x, y, indices, y.numel(), H=H, W=W, OH=down, OW=across, DOWN=rows, ACROSS=columns, C=C, BLOCK=_BLOCK
    )
    return y, indices


def adapt_back(g: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of x, of this shape, from that of `adapt(x)`."""
    (_, C, H, W), (down, across) = shape, indices.shape[2:]
    dx = blank(shape, g)
    _adapt_back[(triton.cdiv(dx.numel(), _BLOCK),)](
        g, indices, dx, dx.numel(), H=H, W=W, OH=down, OW=across, ACROSS=largest_window(H, W, down, across)[1],
        C=C, BLOCK=_BLOCK,
    )  # fmt: skip
    return dx
