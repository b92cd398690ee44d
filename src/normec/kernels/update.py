"""The update of memories ``[c, d]`` in two passes: the distances ‖∇f_i − g_i‖, then the messages and memories."""

# mypy: ignore-errors
# (Triton's kernels are not checked as Python code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LONGEST = 256  # squares that are added up one after another: their rounding lifts a norm by at most 256 · 2^-25


@triton.jit
def _distances(
    g, m, index, part, d, g_stride, m_stride, span,
    MEMORY: tl.constexpr, INDEX: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    where = row.to(tl.int64)
    if INDEX:
        where = tl.load(index + row)
    square = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum((split + 1) * span, d)
    for start in range(split * span, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(g + row.to(tl.int64) * g_stride + at, mask=at < end, other=0.0)
        if MEMORY:
            v -= tl.load(m + where * m_stride + at, mask=at < end, other=0.0).to(tl.float32)
        square += v * v
    tl.store(part + row * SPLITS + split, tl.sum(square, 0))


@triton.jit
def _move(
    g, m, index, factor, weight, total, c, d, g_stride, m_stride, per_group, beta, keep, seed,
    MEMORY: tl.constexpr, INDEX: tl.constexpr, ROUND: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    mask = at < d
    found = tl.zeros((BLOCK,), tl.float32)
    for row in range(group * per_group, tl.minimum((group + 1) * per_group, c)):
        where = tl.cast(row, tl.int64)
        if INDEX:
            where = tl.load(index + row)
        v = tl.load(g + tl.cast(row, tl.int64) * g_stride + at, mask=mask, other=0.0)
        s = tl.load(factor + row)
        if MEMORY:
            held = tl.load(m + where * m_stride + at, mask=mask, other=0.0).to(tl.float32)
            kept = keep * held
            message = s * (v - held)
            held = kept + beta * message
            if ROUND:  # stochastically to bfloat16, which keeps the mean
                bits = held.to(tl.int32, bitcast=True)
                draw = tl.randint(seed, (row * d + at).to(tl.int32)).to(tl.int32, bitcast=True) & 0xFFFF
                moved = ((bits + draw) & -65536).to(tl.float32, bitcast=True)
                held = tl.where(held == held, moved, held)  # the bits of NaN would wrap around to a number
                message = (held - kept) / beta  # the message is what the memory took, so that ĝ stays the mean
            tl.store(m + where * m_stride + at, held.to(m.dtype.element_ty), mask=mask)
            if WEIGHT:
                message *= tl.load(weight + row)
            found += message
        else:
            if WEIGHT:
                s *= tl.load(weight + row)
            found += s * v
    tl.store(total + group * d + at, found, mask=mask)


def distances(g: Tensor, memory: Tensor | None, index: Tensor | None) -> Tensor:
    """Return ‖g_row − memory_row‖ ``[c, 1]``; `index` are the rows of the memory, if they are not the first c."""
    c, d = g.shape
    block = 4096
    splits = splits_of(c, d, block)
    span = triton.cdiv(triton.cdiv(d, splits), block) * block
    part = g.new_empty(c, splits)
    held = g if memory is None else memory
    _distances[(c, splits)](
        g, held, g if index is None else index, part, d, g.stride(0), held.stride(0), span,
        MEMORY=memory is not None, INDEX=index is not None, SPLITS=splits, BLOCK=block,
    )  # fmt: skip
    return part.sum(1, keepdim=True).sqrt()


def splits_of(c: int, d: int, block: int) -> int:
    """Return into how many parts a row is divided: enough to fill the device, and for short sums of squares."""
    splits = 1
    while d > _LONGEST * splits * block or (splits < 64 and c * splits < 16384 and d > 2 * splits * block):
        splits *= 2
    return splits


def move(
    g: Tensor,
    memory: Tensor | None,
    index: Tensor | None,
    factor: Tensor,
    beta: float,
    keep: float,
    seed: int,
    weights: Tensor | None = None,
) -> Tensor:
    """Return Σ weight·factor·v with v = g − memory, and set memory ← keep·memory + beta·factor·v in place."""
    c, d = g.shape
    block = 1024
    groups = max(1, min(32, c // 16))
    total = g.new_empty(groups, d)
    held = g if memory is None else memory
    _move[(triton.cdiv(d, block), groups)](
        g, held, g if index is None else index, factor, g if weights is None else weights, total, c, d,
        g.stride(0), held.stride(0), triton.cdiv(c, groups), beta, keep, seed & 0x7FFFFFFF,
        MEMORY=memory is not None, INDEX=index is not None, ROUND=held.dtype == torch.bfloat16,
        WEIGHT=weights is not None, BLOCK=block,
    )  # fmt: skip
    return total.sum(0) if groups > 1 else total[0]
