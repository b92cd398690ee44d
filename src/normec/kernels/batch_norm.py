"""BatchNorm with each client's statistics, on rows ``[clients · P, C]`` (channels last), in two passes per direction.

If `convolution` made the input and computed its moments, one forward pass is enough. The kernels can also add a
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
from .convolution import Moments
from .relu import back, follow

_BLOCK_P = 128
_MOST = 2**15  # programs along a dimension of the grid


@triton.jit
def _moments(x, part, P, C, span, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sum x − x₀ and (x − x₀)² over a span of a client's rows; x₀, its first row, keeps the variance accurate."""
    client, split = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = x + client.to(tl.int64) * P * C
    shift = tl.load(own + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    end = tl.minimum((split + 1) * span, P)
    for start in range(split * span, end, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        mask = (r < end)[:, None] & (c < C)[None, :]
        value = tl.load(own + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        total += value
        square += value * value
    out = part + (client * SPLITS + split) * 2 * C + c
    tl.store(out, tl.sum(total, 0), mask=c < C)
    tl.store(out + C, tl.sum(square, 0), mask=c < C)


@triton.jit
def _combine(
    moments, mean_out, inverse_out, running_mean, running_var, P, C, count, momentum, eps,
    PIXELS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, RUNNING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute a client's mean and 1/std from the means of parts of `EACH` numbers, and the squares around them."""
    client = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = c < C
    own = moments + client.to(tl.int64) * count * 2 * PADDED + c
    mean = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        at = (r // PIXELS * 2 * PIXELS + r % PIXELS) * PADDED
        mask = (r < count)[:, None] & valid[None, :]
        mean += tl.sum(tl.load(own[None, :] + at[:, None], mask=mask, other=0.0), 0)
    mean = mean / count
    square = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        at = (r // PIXELS * 2 * PIXELS + r % PIXELS) * PADDED
        mask = (r < count)[:, None] & valid[None, :]
        away = tl.load(own[None, :] + at[:, None], mask=mask, other=0.0) - mean[None, :]
        within = tl.load(own[None, :] + at[:, None] + PIXELS * PADDED, mask=mask, other=0.0)
        square += tl.sum(tl.where(mask, within + EACH * away * away, 0.0), 0)
    _keep(mean, square / P, mean_out, inverse_out, running_mean, running_var, client, c, C, P, momentum, eps, RUNNING)


@triton.jit
def _keep(
    mean, variance, mean_out, inverse_out, running_mean, running_var, client, c, C, P, momentum, eps,
    RUNNING: tl.constexpr,
):  # fmt: skip
    """Store what the other kernels read, and update the running statistics."""
    at, valid = client * C + c, c < C
    tl.store(mean_out + at, mean, mask=valid)
    tl.store(inverse_out + at, 1.0 / tl.sqrt(variance + eps), mask=valid)
    if RUNNING:
        old = tl.load(running_mean + at, mask=valid)
        tl.store(running_mean + at, (1 - momentum) * old + momentum * mean, mask=valid)
        old = tl.load(running_var + at, mask=valid)
        tl.store(running_var + at, (1 - momentum) * old + momentum * variance * (P / (P - 1.0)), mask=valid)


@triton.jit
def _scales(weight, bias, inverse_in, c, C, AFFINE: tl.constexpr):
    """Return what a centred x is multiplied by, and what is added then."""
    scale = tl.load(inverse_in + c, mask=c < C, other=0.0)
    offset = tl.zeros_like(scale)
    if AFFINE:
        scale *= tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
        offset = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def _normalise(
    x, y, shortcut, weight, bias, part, mean_out, inverse_out, running_mean, running_var, P, C, span, momentum, eps,
    AFFINE: tl.constexpr, RUNNING: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, KNOWN: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`KNOWN`: mean and 1/std are there already."""
    client, split = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = c < C
    own = client.to(tl.int64) * P * C
    if KNOWN:
        mean = tl.load(mean_out + client * C + c, mask=valid, other=0.0)
        inverse = tl.load(inverse_out + client * C + c, mask=valid, other=0.0)
    else:
        shift = tl.load(x + own + c, mask=valid, other=0.0).to(tl.float32)
        s = tl.arange(0, SPLITS)
        sums = part + (client * SPLITS + s[:, None]) * 2 * C + c[None, :]
        away = tl.sum(tl.load(sums, mask=valid[None, :], other=0.0), 0) / P
        square = tl.sum(tl.load(sums + C, mask=valid[None, :], other=0.0), 0) / P
        variance = tl.maximum(square - away * away, 0.0)
        mean = shift + away
        inverse = 1.0 / tl.sqrt(variance + eps)
        if split == 0:
            _keep(
                mean, variance, mean_out, inverse_out, running_mean, running_var, client, c, C, P, momentum, eps,
                RUNNING,
            )  # fmt: skip
    scale, offset = inverse, tl.zeros_like(inverse)
    if AFFINE:
        scale = inverse * tl.load(weight + c, mask=valid, other=0.0).to(tl.float32)
        offset = tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)
    end = tl.minimum((split + 1) * span, P)
    for start in range(split * span, end, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        mask = (r < end)[:, None] & valid[None, :]
        at = own + r[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + offset[None, :]
        value = follow(value, shortcut, at, mask, RELU, SHORTCUT)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _slopes(
    g, also, x, y, passed, weight, bias, mean_in, inverse_in, part, P, C, span,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ALSO: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum g and g (x − mean) over a span of a client's rows, and store `passed`, the g that ReLU lets through.

    `passed` is stored only if there is a shortcut, or the gradient of a second use of the output.
    """
    client, split = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = client.to(tl.int64) * P * C
    mean = tl.load(mean_in + client * C + c, mask=c < C, other=0.0)
    scale, offset = _scales(weight, bias, inverse_in + client * C, c, C, AFFINE)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    along = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    end = tl.minimum((split + 1) * span, P)
    for start in range(split * span, end, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        mask = (r < end)[:, None] & (c < C)[None, :]
        at = own + r[:, None] * C + c[None, :]
        slope, value = back(g, also, x, y, at, mask, mean, scale, offset, RELU, SHORTCUT, ALSO)
        if SHORTCUT or ALSO:
            tl.store(passed + at, slope.to(passed.dtype.element_ty), mask=mask)
        total += slope
        along += slope * value
    out = part + (client * SPLITS + split) * 2 * C + c
    tl.store(out, tl.sum(total, 0), mask=c < C)
    tl.store(out + C, tl.sum(along, 0), mask=c < C)


@triton.jit
def _apply(
    g, x, dx, weight, bias, mean_in, inverse_in, part, by_weight, by_bias, weight_stride, bias_stride, P, C, span,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    client, split = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = c < C
    own = client.to(tl.int64) * P * C
    mean = tl.load(mean_in + client * C + c, mask=valid, other=0.0)
    inverse = tl.load(inverse_in + client * C + c, mask=valid, other=0.0)
    s = tl.arange(0, SPLITS)
    sums = part + (client * SPLITS + s[:, None]) * 2 * C + c[None, :]
    total = tl.sum(tl.load(sums, mask=valid[None, :], other=0.0), 0)
    along = tl.sum(tl.load(sums + C, mask=valid[None, :], other=0.0), 0) * inverse
    scale, offset = _scales(weight, bias, inverse_in + client * C, c, C, AFFINE)
    if AFFINE and split == 0:
        tl.store(by_weight + client.to(tl.int64) * weight_stride + c, along, mask=valid)
        tl.store(by_bias + client.to(tl.int64) * bias_stride + c, total, mask=valid)
    end = tl.minimum((split + 1) * span, P)
    for start in range(split * span, end, BLOCK_P):
        r = start + tl.arange(0, BLOCK_P)
        mask = (r < end)[:, None] & valid[None, :]
        at = own + r[:, None] * C + c[None, :]
        slope, value = back(g, g, x, x, at, mask, mean, scale, offset, RELU, False, False)
        value *= inverse[None, :]
        slope = scale[None, :] * (slope - total[None, :] / P - value * (along[None, :] / P))
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=mask)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    clients: int,
    momentum: float,
    eps: float,
    relu: bool = False,
    shortcut: Tensor | None = None,
    moments: Moments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1/std) of x, which is ``[clients · P, C]`` in memory.

    Running statistics ``[clients, C]`` are updated in place. `moments` are those of x, if the convolution that made it
    has computed them.
    """
    C = x.shape[1]
    P = x.numel() // (clients * C)
    grid, span, blocks = _grid(clients, P, C)
    mean, inverse = x.new_empty(2, clients, C, dtype=torch.float32)
    y = torch.empty_like(x)
    means, variances = running if running is not None else (mean, mean)
    if moments is None:
        part = x.new_empty(clients, blocks["SPLITS"], 2, C, dtype=torch.float32)
        _moments[grid](x, part, P, C, span, **blocks)
    else:
        part, (pixels, padded_writes) = moments.values, moments.values.shape[2:]
        count, wide = moments.parts * pixels, 16
        _combine[(clients, triton.cdiv(C, wide))](
            part, mean, inverse, means, variances, P, C, count, momentum, eps, PIXELS=pixels,
            PADDED=padded_writes, EACH=moments.each, RUNNING=running is not None,
            ROWS=min(512, triton.next_power_of_2(count)), BLOCK_C=wide, num_warps=8,
        )  # fmt: skip
    _normalise[grid](
        x, y, pointer(shortcut, x), *scales(weight, bias, x), part, mean, inverse, means, variances,
        P, C, span, momentum, eps, AFFINE=weight is not None, RUNNING=running is not None,
        RELU=relu, SHORTCUT=shortcut is not None, KNOWN=moments is not None, **blocks,
    )  # fmt: skip
    return y, mean, inverse


def evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    eps: float,
    shortcut: Tensor | None = None,
) -> Tensor:
    """Return relu(y + shortcut) of a BatchNorm in evaluation mode, with the running mean and variance ``[C]``."""
    C = x.shape[1]
    P = x.numel() // C
    (_, _, across), _, blocks = _grid(1, P, C)
    span = blocks["BLOCK_P"] * max(4, triton.cdiv(P, blocks["BLOCK_P"] * _MOST))
    mean, y, inverse = statistics[0].float(), torch.empty_like(x), (statistics[1].float() + eps).rsqrt()
    _normalise[(1, triton.cdiv(P, span), across)](
        x, y, pointer(shortcut, x), *scales(weight, bias, x), mean, mean, inverse, mean, mean,
        P, C, span, 0.0, eps, AFFINE=weight is not None, RUNNING=False, RELU=True, SHORTCUT=shortcut is not None,
        KNOWN=True, **blocks,
    )  # fmt: skip
    return y


def backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    by_weight: Tensor,
    by_bias: Tensor,
    relu: bool = False,
    y: Tensor | None = None,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the data gradient and the shortcut's gradient, and write the weight and bias gradients ``[clients, C]``.

    The shortcut's gradient is None unless the output `y` is given, which a norm with a shortcut needs. `also` is the
    gradient of a second use of the output, which is added to g. Rows that are written may be any distance apart.
    """
    clients, C = mean.shape
    P = x.numel() // (clients * C)
    grid, span, blocks = _grid(clients, P, C)
    part = x.new_empty(clients, blocks["SPLITS"], 2, C, dtype=torch.float32)
    dx, passed = torch.empty_like(x), None if y is None and also is None else torch.empty_like(x)
    affine = weight is not None
    _slopes[grid](
        g, pointer(also, g), x, pointer(y, x), pointer(passed, x), *scales(weight, bias, x), mean, inverse, part,
        P, C, span, AFFINE=affine, RELU=relu, SHORTCUT=y is not None, ALSO=also is not None, **blocks,
    )  # fmt: skip
    _apply[grid](
        pointer(passed, g), x, dx, *scales(weight, bias, x), mean, inverse, part, by_weight, by_bias,
        by_weight.stride(0), by_bias.stride(0), P, C, span, AFFINE=affine, RELU=relu and passed is None, **blocks,
    )  # fmt: skip
    return dx, passed if y is not None else None


def _grid(clients: int, P: int, C: int) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """Return a grid of enough programs to fill the device, the rows of a client that each has, and the blocks."""
    wide = min(64, max(16, triton.next_power_of_2(C)))
    tall = _BLOCK_P * 16 // wide
    across = triton.cdiv(C, wide)
    splits = 1
    while splits < 64 and clients * across * splits < 512 and 2 * splits * tall < P:
        splits *= 2
    span = triton.cdiv(triton.cdiv(P, splits), tall) * tall
    return (clients, splits, across), span, {"SPLITS": splits, "BLOCK_P": tall, "BLOCK_C": wide}
