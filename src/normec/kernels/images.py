"""Byte images prepared for the model in one pass: looked up, cropped, flipped and normalised, with channels last.

`data.augment` has the definitions; the kernel computes the same bits.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blank, pointer

_BLOCK = 256  # pixels per program


@triton.jit
def _prepare(
    images, numbers, uniforms, mean, std, out,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr,
    CROP: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`CHANNELS` is C, padded to a power of two."""
    record = tl.program_id(0)
    p, c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    row, column = p // W, p % W
    if CROP:
        down = tl.load(uniforms + record * 3) * (2 * PADDING + 1)
        right = tl.load(uniforms + record * 3 + 1) * (2 * PADDING + 1)
        flipped = tl.load(uniforms + record * 3 + 2) < 0.5
        row += tl.minimum(down.to(tl.int32), 2 * PADDING) - PADDING
        column = tl.where(flipped, W - 1 - column, column) + tl.minimum(right.to(tl.int32), 2 * PADDING) - PADDING
    inside = (p < H * W) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = tl.load(numbers + record).to(tl.int64) * (C * H * W) + c[None, :] * (H * W) + (row * W + column)[:, None]
    value = tl.load(images + at, mask=inside[:, None] & (c < C)[None, :], other=0).to(tl.float32)
    value = tl.div_rn(value, tl.full((BLOCK, CHANNELS), 255.0, tl.float32))
    centre = tl.load(mean + c, mask=c < C, other=0.0)
    width = tl.load(std + c, mask=c < C, other=1.0)
    value = tl.div_rn(value - centre[None, :], tl.broadcast_to(width[None, :], (BLOCK, CHANNELS)))
    to = (record.to(tl.int64) * H * W + p)[:, None] * C + c[None, :]
    tl.store(out + to, value, mask=(p < H * W)[:, None] & (c < C)[None, :])


def prepare(
    images: Tensor, numbers: Tensor, mean: Tensor, std: Tensor, uniforms: Tensor | None = None, padding: int = 0
) -> Tensor:
    """Return float32 images ``[len(numbers), C, H, W]`` from bytes; `uniforms`, three per image, are for `CropFlip`."""
    _, C, H, W = images.shape
    out = blank((len(numbers), C, H, W), images, torch.float32)
    _prepare[(len(numbers), triton.cdiv(H * W, _BLOCK))](
        images, numbers, pointer(uniforms, mean), mean, std, out, H=H, W=W, C=C, CHANNELS=triton.next_power_of_2(C),
        CROP=uniforms is not None, PADDING=padding, BLOCK=_BLOCK,
    )  # fmt: skip
    return out
