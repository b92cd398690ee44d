"""The addition of a shortcut and ReLU, as parts of the kernels of norms, and their backward."""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(value, shortcut, at, mask, RELU: tl.constexpr, SHORTCUT: tl.constexpr):
    """Return relu(value + shortcut), with either or both operations."""
    if SHORTCUT:
        value += tl.load(shortcut + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # keeps NaN
    return value


@triton.jit
def back(
    g, also, x, y, at, mask, mean, scale, offset, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ALSO: tl.constexpr
):  # fmt: skip
    """Return (the gradient after ReLU, x minus its mean).

    With a shortcut, the output y shows where ReLU was active; otherwise the norm is computed again from x. `ALSO`: the
    output was used twice, and its gradient is the sum of two.
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
