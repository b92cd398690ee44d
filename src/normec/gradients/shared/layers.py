"""Layers with one weight gradient a client: the input ``[c·B, …]`` holds the records of c clients, one after another.

Forward and data gradient are those of an ordinary layer on the whole batch. Only what belongs to a client is done
client by client: weight gradients (written into the slots, not returned to autograd) and BatchNorm's statistics.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ... import kernels
from .slots import Slot

aten = torch.ops.aten


class LinearRows(Function):
    """y = x Wᵀ + b on [..., in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slots: tuple[Slot | None, Slot | None]):
        x, weight = x.to(_precision(x)), weight.to(_precision(x))
        ctx.save_for_backward(x, weight)
        ctx.slots = slots
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        if for_weight is not None:
            c = for_weight.sink.clients
            left, right = g.reshape(c, -1, g.shape[-1]), x.reshape(c, -1, x.shape[-1])
            for_weight.put(lambda rows: product(left, right, rows))
        if for_bias is not None:
            per_client = g.reshape(for_bias.sink.clients, -1, g.shape[-1])
            for_bias.put(lambda rows: rows.copy_(per_client.sum(1, dtype=rows.dtype)))
        return (g @ weight if ctx.needs_input_grad[0] else None), None, None, None


class ConvRows(Function):
    """Convolution over 1, 2 or 3 dimensions, groups and dilation included."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slots: tuple[Slot | None, Slot | None],
        geometry: tuple[list[int], list[int], list[int], int],
    ):
        x = x.to(_precision(x))
        weight = weight.to(x.dtype)
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.geometry = slots, geometry
        stride, padding, dilation, groups = geometry
        bias = None if bias is None else bias.to(x.dtype)
        return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        stride, padding, dilation, groups = ctx.geometry
        settings = (None, stride, padding, dilation, False, [0] * len(stride), groups)
        if for_weight is not None:
            c = for_weight.sink.clients

            def write(rows: Tensor) -> None:
                if _kernel_for_conv(x, g, rows, groups):
                    from ...kernels.convolution import weight_gradients

                    exact = not torch.backends.cudnn.allow_tf32
                    weight_gradients(_last(x), _last(g), rows, stride, padding, dilation, exact)
                    return
                for row, own_g, own_x in zip(rows, g.chunk(c), x.chunk(c), strict=True):
                    row.copy_(aten.convolution_backward(own_g, own_x, weight, *settings, [False, True, False])[1])

            for_weight.put(write)
        if for_bias is not None:
            per_client = g.reshape(for_bias.sink.clients, -1, *g.shape[1:]).flatten(3)
            for_bias.put(lambda rows: rows.copy_(per_client.sum((1, 3), dtype=rows.dtype)))
        data = None
        if ctx.needs_input_grad[0]:  # not the first layer's
            data = aten.convolution_backward(g, x, weight, *settings, [True, False, False])[0]
        return data, None, None, None, None


class EmbeddingRows(Function):
    """Rows of a table, looked up by number."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, slot: Slot, padding: int):
        ctx.save_for_backward(numbers)
        ctx.slot, ctx.padding = slot, padding
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        (numbers,) = ctx.saved_tensors
        slot, c, size = ctx.slot, ctx.slot.sink.clients, ctx.slot.shape[0]
        own = numbers.reshape(c, -1)
        shifted = own + size * torch.arange(c, device=own.device)[:, None]  # every client has a table of its own
        g = g.reshape(c, -1, g.shape[-1])
        if ctx.padding >= 0:
            g = g.masked_fill((own == ctx.padding)[..., None], 0)
        slot.put(lambda rows: rows.copy_(aten.embedding_dense_backward(g, shifted, c * size, -1, False).view_as(rows)))
        return None, None, None, None


class AffineRows(Function):
    """y = x·w + b after a normalisation that looks at one record alone; w and b along `dims` of one record."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slots: tuple[Slot | None, Slot | None], first: bool
    ):
        """`first`: w runs along the first dimension after the batch (channels), else along the last ones."""
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.first = slots, first
        broad = (lambda p: p.view(-1, *[1] * (x.ndim - 2))) if first else (lambda p: p)
        y = x * broad(weight).to(x.dtype)
        return y if bias is None else y + broad(bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots

        def total(values: Tensor, rows: Tensor) -> None:
            c = len(rows)
            if ctx.first:
                rows.copy_(values.reshape(c, -1, values.shape[1], values[0, 0].numel()).sum((1, 3), dtype=rows.dtype))
            else:
                rows.copy_(values.reshape(c, -1, *rows.shape[1:]).sum(1, dtype=rows.dtype))

        if for_weight is not None:
            for_weight.put(lambda rows: total(g * x, rows))
        if for_bias is not None:
            for_bias.put(lambda rows: total(g, rows))
        broad = weight.view(-1, *[1] * (x.ndim - 2)) if ctx.first else weight
        return (g * broad.to(g.dtype) if ctx.needs_input_grad[0] else None), None, None, None, None


class GroupNormRows(Function):
    """GroupNorm by one kernel each way; for channels-last images on a GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: tuple[Slot | None, Slot | None],
        groups: int,
        eps: float,
    ):
        from ...kernels import group_norm

        x = _last(x)
        y, mean, inverse = group_norm.forward(x, groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.slots, ctx.groups = slots, groups
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels import group_norm

        x, weight, mean, inverse = ctx.saved_tensors
        data, sums = group_norm.backward(_last(g), x, ctx.groups, weight, mean, inverse)
        for part, slot in enumerate(ctx.slots):
            if slot is not None:
                own = sums.view(slot.sink.clients, -1, *sums.shape[1:])[:, :, part]
                slot.put(lambda rows, own=own: torch.sum(own, 1, out=rows))
        return data, None, None, None, None, None

    @staticmethod
    def fits(x: Tensor, groups: int) -> bool:
        if x.ndim != 4 or not kernels.usable(x):
            return False
        from ...kernels import group_norm

        return group_norm.fits(x.shape[1], groups)


class BatchNormRows(Function):
    """BatchNorm in training with every client's own statistics; running statistics are updated row by row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: tuple[Slot | None, Slot | None],
        running: tuple[Tensor, Tensor] | None,
        clients: int,
        momentum: float,
        eps: float,
    ):
        ctx.slots, ctx.clients, ctx.eps = slots, clients, eps
        if _kernel_for_norm(x):
            from ...kernels import batch_norm

            x = _last(x)
            y, mean, inverse = batch_norm.forward(x, weight, bias, running, clients, momentum, eps)
        else:
            y, means, inverses = torch.empty_like(x), [], []
            for client, (own, out) in enumerate(zip(x.chunk(clients), y.chunk(clients), strict=True)):
                rows = (running[0][client], running[1][client]) if running is not None else (None, None)
                normed, own_mean, own_inverse = torch.native_batch_norm(own, weight, bias, *rows, True, momentum, eps)
                out.copy_(normed)
                means.append(own_mean)
                inverses.append(own_inverse)
            mean, inverse = torch.stack(means), torch.stack(inverses)
        ctx.save_for_backward(x, weight, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight, mean, inverse = ctx.saved_tensors
        c = ctx.clients
        by_weight, by_bias = (slot.rows if slot is not None else torch.empty_like(mean) for slot in ctx.slots)
        before = [slot.rows.clone() if slot is not None and slot.written else None for slot in ctx.slots]
        if _kernel_for_norm(x):
            from ...kernels import batch_norm

            data = batch_norm.backward(_last(g), x, weight, mean, inverse, by_weight, by_bias)
        else:
            data = torch.empty_like(x)
            for client, (own_g, own_x, out) in enumerate(zip(g.chunk(c), x.chunk(c), data.chunk(c), strict=True)):
                found = aten.native_batch_norm_backward(
                    own_g, own_x, weight, None, None, mean[client], inverse[client], True, ctx.eps, [True, True, True]
                )
                out.copy_(found[0])
                if weight is not None:
                    by_weight[client], by_bias[client] = found[1], found[2]
        for slot, earlier in zip(ctx.slots, before, strict=True):
            if slot is not None:
                slot.written = True
                if earlier is not None:  # a parameter used twice
                    slot.rows.add_(earlier)
        return data, None, None, None, None, None, None, None


def product(left: Tensor, right: Tensor, rows: Tensor) -> None:
    """rows[i] = left[i]ᵀ right[i], written in place where precisions agree."""
    if left.dtype == rows.dtype:
        torch.bmm(left.mT, right, out=rows)
    else:
        rows.copy_(torch.bmm(left.mT, right))


def _kernel_for_conv(x: Tensor, g: Tensor, rows: Tensor, groups: int) -> bool:
    return x.ndim == 4 and groups == 1 and rows.dtype == torch.float32 and kernels.usable(x, g)


def _kernel_for_norm(x: Tensor) -> bool:
    return x.ndim in (2, 4) and kernels.usable(x)


def _last(x: Tensor) -> Tensor:
    """Channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()


def _precision(x: Tensor) -> torch.dtype:
    """What autocast would compute in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
