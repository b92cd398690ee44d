"""GroupNorm, ReLU and the largest of every 2×2 pixels at once, on small channels-last images: one program an image.

A program holds an image as four parts, one for each place in a square of 2×2 pixels: what lies in one square is then
compared number by number. What is normalised but not pooled is never written.
"""

# mypy: ignore-errors
# (Triton's kernels are a language of their own inside Python)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank, scales
from .group_norm import HELD, affine, by_group, warps
from .pooling import better


@triton.jit
def _places(image, W, SQUARES, C: tl.constexpr, BLOCK: tl.constexpr):
    """Channels, the first pixel of every square in x, the square in y, and which squares there are."""
    c, r = tl.arange(0, C), tl.arange(0, BLOCK)
    first = (r // (W // 2)) * 2 * W + r % (W // 2) * 2
    own = image.to(tl.int64) * SQUARES * C
    return c, 4 * own + first[:, None] * C + c[None, :], own + r[:, None] * C + c[None, :], (r < SQUARES)[:, None]


@triton.jit
def _centred(x, at, real, mean):
    return tl.where(real, tl.load(x + at, mask=real, other=0.0).to(tl.float32) - mean[None, :], 0.0)


@triton.jit
def _made(value, scale, offset, KIND: tl.constexpr):
    """What the norm and ReLU make of it, rounded as it would be written: equal numbers are told apart by place."""
    found = value * scale[None, :] + offset[None, :]
    return tl.where(found <= 0, 0.0, found).to(KIND)  # NaN stays


@triton.jit
def _largest(a, b, c, d, real, scale, offset, KIND: tl.constexpr):
    """The largest of four, made so, and which it was."""
    best = _made(a, scale, offset, KIND)
    place = tl.zeros_like(best).to(tl.int32)
    best, place = better(_made(b, scale, offset, KIND), best, 1, place, real)
    best, place = better(_made(c, scale, offset, KIND), best, 2, place, real)
    return better(_made(d, scale, offset, KIND), best, 3, place, real)


@triton.jit
def _forward(
    x, y, weight, bias, mean_out, inverse_out, W, SQUARES, eps,
    AFFINE: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    c, at, out, real = _places(image, W, SQUARES, C, BLOCK)
    count = 4 * SQUARES * (C // G)
    nothing = tl.zeros((C,), tl.float32)
    one, two = _centred(x, at, real, nothing), _centred(x, at + C, real, nothing)
    three, four = _centred(x, at + W * C, real, nothing), _centred(x, at + W * C + C, real, nothing)
    mean = by_group(tl.sum((one + two) + (three + four), 0), G, C) / count
    one, two = tl.where(real, one - mean[None, :], 0.0), tl.where(real, two - mean[None, :], 0.0)
    three, four = tl.where(real, three - mean[None, :], 0.0), tl.where(real, four - mean[None, :], 0.0)
    square = by_group(tl.sum((one * one + two * two) + (three * three + four * four), 0), G, C) / count
    inverse = 1.0 / tl.sqrt(square + eps)
    tl.store(mean_out + image * C + c, mean)
    tl.store(inverse_out + image * C + c, inverse)
    scale, offset = affine(weight, bias, c, C, AFFINE)
    best, _ = _largest(one, two, three, four, real, inverse * scale, offset, y.dtype.element_ty)
    tl.store(y + out, best, mask=real)


@triton.jit
def _backward(
    g, x, dx, weight, bias, mean_in, inverse_in, sums, W, SQUARES,
    AFFINE: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    c, at, out, real = _places(image, W, SQUARES, C, BLOCK)
    count = 4 * SQUARES * (C // G)
    mean = tl.load(mean_in + image * C + c)
    inverse = tl.load(inverse_in + image * C + c)
    scale, offset = affine(weight, bias, c, C, AFFINE)
    one, two = _centred(x, at, real, mean), _centred(x, at + C, real, mean)
    three, four = _centred(x, at + W * C, real, mean), _centred(x, at + W * C + C, real, mean)
    best, place = _largest(one, two, three, four, real, inverse * scale, offset, x.dtype.element_ty)
    slope = tl.where(best <= 0, 0.0, tl.load(g + out, mask=real, other=0.0).to(tl.float32))
    chosen = tl.where(place == 0, one, tl.where(place == 1, two, tl.where(place == 2, three, four)))
    total, along = tl.sum(slope, 0), tl.sum(slope * chosen * inverse[None, :], 0)
    tl.store(sums + image * 2 * C + c, along)
    tl.store(sums + image * 2 * C + C + c, total)
    by_total = by_group(total * scale, G, C) / count
    by_along = by_group(along * scale, G, C) / count
    slope *= scale[None, :]
    _store(dx, at, real, tl.where(place == 0, slope, 0.0), one, inverse, by_total, by_along)
    _store(dx, at + C, real, tl.where(place == 1, slope, 0.0), two, inverse, by_total, by_along)
    _store(dx, at + W * C, real, tl.where(place == 2, slope, 0.0), three, inverse, by_total, by_along)
    _store(dx, at + W * C + C, real, tl.where(place == 3, slope, 0.0), four, inverse, by_total, by_along)


@triton.jit
def _store(dx, at, real, slope, value, inverse, by_total, by_along):
    slope = inverse[None, :] * (slope - by_total[None, :] - value * (inverse * by_along)[None, :])
    tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=real)


def fits(shape: tuple[int, ...]) -> bool:
    """Images of whole squares that a program can hold."""
    _, C, H, W = shape
    return H % 2 == 0 and W % 2 == 0 and 0 < 4 * triton.next_power_of_2(H * W // 4) * C <= HELD


def forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1/std) as `group_norm.forward` has them, y half as high and wide."""
    images, C, H, W = x.shape
    mean, inverse = x.new_empty(2, images, C, dtype=torch.float32)
    y = blank((images, C, H // 2, W // 2), x)
    _forward[(images,)](
        x, y, *scales(weight, bias, x), mean, inverse, W, H * W // 4, eps,
        AFFINE=weight is not None, G=groups, C=C, **_block(H * W // 4, C),
    )  # fmt: skip
    return y, mean, inverse


def backward(
    g: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The data gradient, and each image's weight and bias gradients ``[images, 2, C]``."""
    images, C, H, W = x.shape
    sums, dx = x.new_empty(images, 2, C, dtype=torch.float32), torch.empty_like(x)
    _backward[(images,)](
        g, x, dx, *scales(weight, bias, x), mean, inverse, sums, W, H * W // 4,
        AFFINE=weight is not None, G=groups, C=C, **_block(H * W // 4, C),
    )  # fmt: skip
    return dx, sums


def _block(squares: int, channels: int) -> dict[str, int]:
    block = triton.next_power_of_2(squares)
    return {"BLOCK": block, "num_warps": warps(4 * block * channels)}
