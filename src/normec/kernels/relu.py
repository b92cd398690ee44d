"""What may follow a norm in its own kernels: the addition of a shortcut, then ReLU; and the way back through both."""

# mypy: ignore-errors
# (Triton's kernels are a language of their own inside Python)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(value, shortcut, at, mask, RELU: tl.constexpr, SHORTCUT: tl.constexpr):
    """relu(value + shortcut), either or both."""
    if SHORTCUT:
        value += tl.load(shortcut + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays
    return value


@triton.jit
def back(
    g, also, x, y, at, mask, mean, scale, offset, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ALSO: tl.constexpr
):  # fmt: skip
    """(the slope that ReLU lets through, x less its mean).

    With a shortcut the output y tells what was let through, else the norm's own arithmetic does, from x once more.
    `ALSO`: the output was used twice, and the slope is the sum of two.
    """
    slope = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
    if ALSO:
        slope += tl.load(also + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
    if SHORTCUT:
        slope = tl.where(tl.load(y + at, mask=mask, other=0.0).to(tl.float32) <= 0, 0.0, slope)
    elif RELU:
        slope = tl.where(value * scale[None, :] + offset[None, :] <= 0, 0.0, slope)
    return slope, value
