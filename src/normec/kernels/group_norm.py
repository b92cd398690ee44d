"""GroupNorm on channels-last images, with one program per image; a second kernel sums over a client's images.

A program holds a small image and reads it once; a larger image is read two or three times. The kernels can also add a
shortcut and apply ReLU (`relu`).
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import pointer, scales
from .relu import back, follow

HELD = 2**14  # numbers that a program can hold


@triton.jit
def by_group(values, G: tl.constexpr, C: tl.constexpr):
    """Return the sum over each group's channels, at every channel of the group."""
    sums = tl.sum(tl.reshape(values, (G, C // G)), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (G, C // G)), (C,))


@triton.jit
def over_groups(values, G: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """Return `by_group` of the sums over rows; a group's channels, which lie in one thread, are added up first."""
    sums = tl.sum(tl.sum(tl.reshape(values, (ROWS, G, C // G)), 2), 0)
    return tl.reshape(tl.broadcast_to(sums[:, None], (G, C // G)), (C,))


@triton.jit
def affine(weight, bias, row, c, C: tl.constexpr, AFFINE: tl.constexpr):
    """Return the scale and offset of a norm, from a row of the tables of clients with weights of their own."""
    scale, offset = tl.full((C,), 1.0, tl.float32), tl.zeros((C,), tl.float32)
    if AFFINE:
        scale, offset = tl.load(weight + row * C + c).to(tl.float32), tl.load(bias + row * C + c).to(tl.float32)
    return scale, offset


@triton.jit
def _forward_whole(
    x, y, shortcut, weight, bias, mean_out, inverse_out, P, each, eps,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Compute an image of at most `BLOCK_P` pixels."""
    image = tl.program_id(0)
    c, r = tl.arange(0, C), tl.arange(0, BLOCK_P)
    at, real, count = image.to(tl.int64) * P * C + r[:, None] * C + c[None, :], (r < P)[:, None], P * (C // G)
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    mean = over_groups(value, G, C, BLOCK_P) / count
    value = tl.where(real, value - mean[None, :], 0.0)
    inverse = 1.0 / tl.sqrt(over_groups(value * value, G, C, BLOCK_P) / count + eps)
    tl.store(mean_out + image * C + c, mean)
    tl.store(inverse_out + image * C + c, inverse)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    value = follow(value * (inverse * scale)[None, :] + offset[None, :], shortcut, at, real, RELU, SHORTCUT)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=real)


@triton.jit
def _backward_whole(
    g, also, x, y, dx, passed, weight, bias, mean_in, inverse_in, sums, P, each,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ALSO: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    c, r = tl.arange(0, C), tl.arange(0, BLOCK_P)
    at, real, count = image.to(tl.int64) * P * C + r[:, None] * C + c[None, :], (r < P)[:, None], P * (C // G)
    mean = tl.load(mean_in + image * C + c)
    inverse = tl.load(inverse_in + image * C + c)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    slope, value = back(g, also, x, y, at, real, mean, inverse * scale, offset, RELU, SHORTCUT, ALSO)
    if SHORTCUT:
        tl.store(passed + at, slope.to(passed.dtype.element_ty), mask=real)
    value *= inverse[None, :]
    total, along = tl.sum(slope, 0), tl.sum(slope * value, 0)
    tl.store(sums + image * 2 * C + c, along)
    tl.store(sums + image * 2 * C + C + c, total)
    by_total = by_group(total * scale, G, C) / count
    by_along = by_group(along * scale, G, C) / count
    slope = inverse[None, :] * (slope * scale[None, :] - by_total[None, :] - value * by_along[None, :])
    tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=real)


@triton.jit
def _forward(
    x, y, shortcut, weight, bias, mean_out, inverse_out, P, each, eps,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    c = tl.arange(0, C)
    own = image.to(tl.int64) * P * C
    total = tl.zeros((BLOCK_P, C), tl.float32)
    for start in range(0, P, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        total += tl.load(x + own + r[:, None] * C + c[None, :], mask=(r < P)[:, None], other=0.0).to(tl.float32)
    count = P * (C // G)
    mean = by_group(tl.sum(total, 0), G, C) / count
    square = tl.zeros((BLOCK_P, C), tl.float32)
    for start in range(0, P, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        value = tl.load(x + own + r[:, None] * C + c[None, :], mask=(r < P)[:, None], other=0.0).to(tl.float32)
        value = tl.where((r < P)[:, None], value - mean[None, :], 0.0)
        square += value * value
    inverse = 1.0 / tl.sqrt(by_group(tl.sum(square, 0), G, C) / count + eps)
    tl.store(mean_out + image * C + c, mean)
    tl.store(inverse_out + image * C + c, inverse)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    scale = inverse * scale
    for start in range(0, P, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        at = own + r[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=(r < P)[:, None], other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + offset[None, :]
        value = follow(value, shortcut, at, (r < P)[:, None], RELU, SHORTCUT)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=(r < P)[:, None])


@triton.jit
def _backward(
    g, also, x, y, dx, passed, weight, bias, mean_in, inverse_in, sums, P, each,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ALSO: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    c = tl.arange(0, C)
    own = image.to(tl.int64) * P * C
    mean = tl.load(mean_in + image * C + c)
    inverse = tl.load(inverse_in + image * C + c)
    scale, offset = affine(weight, bias, image // each, c, C, AFFINE)
    total = tl.zeros((BLOCK_P, C), tl.float32)
    along = tl.zeros((BLOCK_P, C), tl.float32)
    for start in range(0, P, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        at = own + r[:, None] * C + c[None, :]
        slope, value = back(g, also, x, y, at, (r < P)[:, None], mean, inverse * scale, offset, RELU, SHORTCUT, ALSO)
        total += slope
        along += slope * value * inverse[None, :]
    channel_total, channel_along = tl.sum(total, 0), tl.sum(along, 0)
    tl.store(sums + image * 2 * C + c, channel_along)
    tl.store(sums + image * 2 * C + C + c, channel_total)
    count = P * (C // G)
    by_total = by_group(channel_total * scale, G, C) / count
    by_along = by_group(channel_along * scale, G, C) / count
    for start in range(0, P, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        at = own + r[:, None] * C + c[None, :]
        slope, value = back(g, also, x, y, at, (r < P)[:, None], mean, inverse * scale, offset, RELU, SHORTCUT, ALSO)
        if SHORTCUT:
            tl.store(passed + at, slope.to(passed.dtype.element_ty), mask=(r < P)[:, None])
        value *= inverse[None, :]
        slope = inverse[None, :] * (slope * scale[None, :] - by_total[None, :] - value * by_along[None, :])
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=(r < P)[:, None])


@triton.jit
def _by_client(sums, by_weight, by_bias, IMAGES, weight_row, bias_row, C: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    k, b = tl.arange(0, 2 * C), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, 2 * C), tl.float32)
    for start in range(0, IMAGES, BLOCK):
        at = (client * IMAGES + start + b[:, None]) * 2 * C + k[None, :]
        total += tl.load(sums + at, mask=(start + b < IMAGES)[:, None], other=0.0)
    found = tl.sum(total, 0)
    tl.store(by_weight + client * weight_row + k, found.to(by_weight.dtype.element_ty), mask=k < C)
    tl.store(by_bias + client * bias_row + k - C, found.to(by_bias.dtype.element_ty), mask=k >= C)


def fits(channels: int, groups: int) -> bool:
    """Whether the channels, at most 1024, and the groups are powers of two, as the sizes of Triton's blocks are."""
    return channels & (channels - 1) == 0 and channels <= 1024 and channels % groups == 0 and groups & (groups - 1) == 0


def forward(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool = False,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1/std) of channels-last x.

    Mean and 1/std are ``[images, C]``, with a group's value at each of its channels. Weight and bias are ``[C]``, or
    ``[clients, C]`` and contiguous.
    """
    images, C = x.shape[:2]
    mean, inverse = x.new_empty(2, images, C, dtype=torch.float32)
    y = torch.empty_like(x)
    whole, blocks = _blocks(x.shape[2] * x.shape[3], C)
    (_forward_whole if whole else _forward)[(images,)](
        x, y, pointer(shortcut, x), *scales(weight, bias, x), mean, inverse,
        x.shape[2] * x.shape[3], images_each(x, weight), eps,
        AFFINE=weight is not None, RELU=relu, SHORTCUT=shortcut is not None, G=groups, C=C, **blocks,
    )  # fmt: skip
    return y, mean, inverse


def backward(
    g: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    relu: bool = False,
    y: Tensor | None = None,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the data gradient, each image's weight and bias gradients ``[images, 2, C]``, and the shortcut's gradient.

    The shortcut's gradient is None unless the output `y` is given, which a norm with a shortcut needs. `also` is the
    gradient of a second use of the output, which is added to g.
    """
    images, C = x.shape[:2]
    sums = x.new_empty(images, 2, C, dtype=torch.float32)
    dx, passed = torch.empty_like(x), torch.empty_like(x) if y is not None else None
    whole, blocks = _blocks(x.shape[2] * x.shape[3], C)
    (_backward_whole if whole else _backward)[(images,)](
        g, pointer(also, g), x, pointer(y, x), dx, pointer(passed, x), *scales(weight, bias, x), mean, inverse, sums,
        x.shape[2] * x.shape[3], images_each(x, weight), AFFINE=weight is not None, RELU=relu, SHORTCUT=y is not None,
        ALSO=also is not None, G=groups, C=C, **blocks,
    )  # fmt: skip
    return dx, sums, passed


def images_each(x: Tensor, weight: Tensor | None) -> int:
    """Return the number of images that share a row of the weights."""
    return len(x) if weight is None or weight.ndim == 1 else len(x) // len(weight)


def by_client(sums: Tensor, by_weight: Tensor, by_bias: Tensor) -> None:
    """Add up the images' gradients ``[images, 2, C]`` of each client, into two tables ``[clients, C]``."""
    clients, (images, _, C) = len(by_weight), sums.shape
    if images % clients:
        raise ValueError(f"{images} images cannot be divided evenly among {clients} clients")
    _by_client[(clients,)](
        sums, by_weight, by_bias, images // clients, by_weight.stride(0), by_bias.stride(0), C=C,
        BLOCK=max(1, min(triton.next_power_of_2(images // clients), 2048 // C)),
    )  # fmt: skip


def _blocks(pixels: int, channels: int) -> tuple[bool, dict[str, int]]:
    """Return whether a program holds a whole image, and the kernel's block of pixels and warps."""
    held = triton.next_power_of_2(pixels) * channels
    if held <= HELD:
        return True, {"BLOCK_P": held // channels, "num_warps": max(1, min(16, held // 1024))}
    return False, {"BLOCK_P": max(1, 4096 // channels)}
