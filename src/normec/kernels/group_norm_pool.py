"""GroupNorm, ReLU and 2×2 max pooling in one kernel, on small channels-last images, with one program per image.

A program treats an image as four parts, one for each position in a square of 2×2 pixels, so that the four pixels of a
square are compared elementwise. Normalised values that are not the maximum are never written. In the forward pass a
program holds the image. In the backward pass it reads the image twice, some squares at a time, the second time from the
cache; this is faster, because many programs run at once.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank, scales
from .group_norm import HELD, affine, by_group, images_each, over_groups


@triton.jit
def _positions(image, start, W: tl.constexpr, SQUARES: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return, for squares from `start` on, the position of the first pixel in x, that in y, and which squares exist."""
    c, r = tl.arange(0, C), start + tl.arange(0, BLOCK)
    first = (r // (W // 2)) * 2 * W + r % (W // 2) * 2
    own = image.to(tl.int64) * SQUARES * C
    return 4 * own + first[:, None] * C + c[None, :], own + r[:, None] * C + c[None, :], (r < SQUARES)[:, None]


@triton.jit
def _read(x, at, real, WHOLE: tl.constexpr):
    """`WHOLE`: all squares exist, so no mask is needed."""
    found = tl.load(x + at) if WHOLE else tl.load(x + at, mask=real, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _minus(value, mean, real, WHOLE: tl.constexpr):
    found = value - mean[None, :]
    if not WHOLE:
        found = tl.where(real, found, 0.0)
    return found


@triton.jit
def _write(y, at, real, value, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(y + at, value.to(y.dtype.element_ty))
    else:
        tl.store(y + at, value.to(y.dtype.element_ty), mask=real)


@triton.jit
def _made(value, scale, offset, KIND: tl.constexpr):
    """Return the normalised value, rounded as if it were written."""
    return (value * scale[None, :] + offset[None, :]).to(KIND).to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _later(value, best, chosen, scale, offset, KIND: tl.constexpr):
    """Return whether the normalised value exceeds the best so far, and the new best; the first of equal numbers stays.

    NaN needs no special treatment, because it makes the mean of the whole group NaN.
    """
    made = _made(value, scale, offset, KIND)
    take = made > best
    return take, tl.where(take, made, best), tl.where(take, value, chosen)


@triton.jit
def _forward(
    x, y, weight, bias, mean_out, inverse_out, each, eps,
    W: tl.constexpr, SQUARES: tl.constexpr, AFFINE: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, c = tl.program_id(0), tl.arange(0, C)
    at, out, real = _positions(image, 0, W, SQUARES, C, BLOCK)
    count = 4 * SQUARES * (C // G)
    whole: tl.constexpr = BLOCK == SQUARES
    one, two = _read(x, at, real, whole), _read(x, at + C, real, whole)
    three, four = _read(x, at + W * C, real, whole), _read(x, at + W * C + C, real, whole)
    mean = over_groups((one + two) + (three + four), G, C, BLOCK) / count
    one, two = _minus(one, mean, real, whole), _minus(two, mean, real, whole)
    three, four = _minus(three, mean, real, whole), _minus(four, mean, real, whole)
    square = over_groups((one * one + two * two) + (three * three + four * four), G, C, BLOCK) / count
    inverse = 1.0 / tl.sqrt(square + eps)
    tl.store(mean_out + image * C + c, mean)
    tl.store(inverse_out + image * C + c, inverse)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    # Norm, rounding and ReLU keep the order up to the sign of the scale, so only one number of four is normalised.
    sign = tl.where(inverse * scale < 0, -1.0, 1.0)[None, :]
    most = _larger(_larger(one * sign, two * sign), _larger(three * sign, four * sign)) * sign
    best = _made(most, inverse * scale, offset, y.dtype.element_ty)
    _write(y, out, real, tl.where(best <= 0, 0.0, best), whole)  # keeps NaN


@triton.jit
def _chosen(
    g, x, at, out, real, mean, inverse, scale, offset, W: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Return the four values of every square, which of the last three were a new maximum, the maximum, its gradient."""
    one = _minus(_read(x, at, real, WHOLE), mean, real, WHOLE)
    two = _minus(_read(x, at + C, real, WHOLE), mean, real, WHOLE)
    three = _minus(_read(x, at + W * C, real, WHOLE), mean, real, WHOLE)
    four = _minus(_read(x, at + W * C + C, real, WHOLE), mean, real, WHOLE)
    best = _made(one, inverse * scale, offset, x.dtype.element_ty)
    second, best, chosen = _later(two, best, one, inverse * scale, offset, x.dtype.element_ty)
    third, best, chosen = _later(three, best, chosen, inverse * scale, offset, x.dtype.element_ty)
    fourth, best, chosen = _later(four, best, chosen, inverse * scale, offset, x.dtype.element_ty)
    slope = tl.where(best <= 0, 0.0, _read(g, out, real, WHOLE))
    return one, two, three, four, second, third, fourth, chosen, slope


@triton.jit
def _backward(
    g, x, dx, weight, bias, mean_in, inverse_in, sums, each,
    W: tl.constexpr, SQUARES: tl.constexpr, AFFINE: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, c = tl.program_id(0), tl.arange(0, C)
    count = 4 * SQUARES * (C // G)
    mean = tl.load(mean_in + image * C + c)
    inverse = tl.load(inverse_in + image * C + c)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    whole: tl.constexpr = SQUARES % BLOCK == 0
    totals, alongs = tl.zeros((BLOCK, C), tl.float32), tl.zeros((BLOCK, C), tl.float32)
    for start in range(0, SQUARES, BLOCK):
        at, out, real = _positions(image, start, W, SQUARES, C, BLOCK)
        _, _, _, _, _, _, _, chosen, slope = _chosen(g, x, at, out, real, mean, inverse, scale, offset, W, C, whole)
        totals += slope
        alongs += slope * chosen
    total, along = tl.sum(totals, 0), tl.sum(alongs, 0) * inverse
    tl.store(sums + image * 2 * C + c, along)
    tl.store(sums + image * 2 * C + C + c, total)
    by_total = by_group(total * scale, G, C) / count
    by_along = by_group(along * scale, G, C) / count
    for start in range(0, SQUARES, BLOCK):
        at, out, real = _positions(image, start, W, SQUARES, C, BLOCK)
        one, two, three, four, second, third, fourth, _, slope = _chosen(
            g, x, at, out, real, mean, inverse, scale, offset, W, C, whole
        )
        slope *= scale[None, :]
        _store(dx, at + W * C + C, real, tl.where(fourth, slope, 0.0), four, inverse, by_total, by_along, whole)
        slope = tl.where(fourth, 0.0, slope)
        _store(dx, at + W * C, real, tl.where(third, slope, 0.0), three, inverse, by_total, by_along, whole)
        slope = tl.where(third, 0.0, slope)
        _store(dx, at + C, real, tl.where(second, slope, 0.0), two, inverse, by_total, by_along, whole)
        _store(dx, at, real, tl.where(second, 0.0, slope), one, inverse, by_total, by_along, whole)


@triton.jit
def _store(dx, at, real, slope, value, inverse, by_total, by_along, WHOLE: tl.constexpr):
    slope = inverse[None, :] * (slope - by_total[None, :] - value * (inverse * by_along)[None, :])
    _write(dx, at, real, slope, WHOLE)


def fits(shape: tuple[int, ...]) -> bool:
    """Whether images consist of complete squares and fit into a program."""
    _, C, H, W = shape
    return H % 2 == 0 and W % 2 == 0 and 0 < 4 * triton.next_power_of_2(H * W // 4) * C <= HELD


def forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1/std) as `group_norm.forward` does, with y of half the height and width."""
    images, C, H, W = x.shape
    mean, inverse = x.new_empty(2, images, C, dtype=torch.float32)
    y = blank((images, C, H // 2, W // 2), x)
    _forward[(images,)](
        x, y, *scales(weight, bias, x), mean, inverse, images_each(x, weight), eps, W=W, SQUARES=H * W // 4,
        AFFINE=weight is not None, G=groups, C=C, **_block(H * W // 4, C, "forward"),
    )  # fmt: skip
    return y, mean, inverse


def backward(
    g: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the data gradient, and each image's weight and bias gradients ``[images, 2, C]``."""
    images, C, H, W = x.shape
    sums, dx = x.new_empty(images, 2, C, dtype=torch.float32), torch.empty_like(x)
    _backward[(images,)](
        g, x, dx, *scales(weight, bias, x), mean, inverse, sums, images_each(x, weight), W=W, SQUARES=H * W // 4,
        AFFINE=weight is not None, G=groups, C=C, **_block(H * W // 4, C, "backward"),
    )  # fmt: skip
    return dx, sums


def _block(squares: int, channels: int, way: str) -> dict[str, int]:
    parts, each, most = (1, 64, 8) if way == "forward" else (4, 16, 4)  # parts per image, numbers per thread, and warps
    block = triton.next_power_of_2(triton.cdiv(squares, parts))
    return {"BLOCK": block, "num_warps": max(1, min(most, 4 * block * channels // (32 * each)))}
