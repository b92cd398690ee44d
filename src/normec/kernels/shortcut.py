"""The shortcut to smaller images with more channels: strided pixels with zero-padded channels, and its backward.

Images have channels last. PyTorch would need one pass to slice and one to pad, and as many in the backward.
"""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import blank

_BLOCK = 1024


@triton.jit
def _pick(
    x, y, size, H, W, OH, OW,
    C: tl.constexpr, OC: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of y
    pixel, c = e // OC, e % OC - FIRST
    image, h, w = pixel // (OH * OW), pixel // OW % OH * STRIDE, pixel % OW * STRIDE
    value = tl.load(x + ((image * H + h) * W + w) * C + c, mask=(e < size) & (c >= 0) & (c < C), other=0.0)
    tl.store(y + e, value, mask=e < size)


@triton.jit
def _spread(
    g, dx, size, H, W, OH, OW,
    C: tl.constexpr, OC: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a number of dx
    pixel, c = e // C, e % C + FIRST
    image, h, w = pixel // (H * W), pixel // W % H, pixel % W
    picked = (h % STRIDE == 0) & (w % STRIDE == 0) & (e < size)
    value = tl.load(g + ((image * OH + h // STRIDE) * OW + w // STRIDE) * OC + c, mask=picked, other=0.0)
    tl.store(dx + e, value, mask=e < size)


def pick(x: Tensor, stride: int, first: int, channels: int) -> Tensor:
    """Return images with `channels` channels: those of x start at `first`, and the others are zero."""
    height, width = x.shape[2:]
    y = blank((len(x), channels, -(-height // stride), -(-width // stride)), x)
    _launch(_pick, x, y, (x, y), stride, first)
    return y


def spread(g: Tensor, like: tuple[int, ...], stride: int, first: int) -> Tensor:
    """Return the gradient of the input of `pick`, of shape `like`, from that of its output."""
    dx = blank(like, g)
    _launch(_spread, g, dx, (dx, g), stride, first)
    return dx


def _launch(kernel, source: Tensor, out: Tensor, sizes: tuple[Tensor, Tensor], stride: int, first: int) -> None:
    large, small = sizes
    kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        source, out, out.numel(), *large.shape[2:], *small.shape[2:],
        C=large.shape[1], OC=small.shape[1], STRIDE=stride, FIRST=first, BLOCK=_BLOCK,
    )  # fmt: skip
