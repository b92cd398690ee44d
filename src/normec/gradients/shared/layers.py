"""Layers with one weight gradient per client; the input ``[c·B, …]`` holds the records of c clients in order.

The forward pass and the data gradient are those of an ordinary layer on the whole batch. Only weight gradients, which
are written into the slots and not returned to autograd, and the statistics of BatchNorm are computed per client.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..precision import autocast_dtype
from .record_sums import product_squares
from .slots import Maybe, ParameterSlot, SlotPair, factors, sum_channels, sum_positions, write_products

aten = torch.ops.aten

# The most numbers of one-hot vectors whose product with the gradients takes a device less time than adding up the rows,
# for which PyTorch sorts the indices on a GPU.
_ONE_HOT = {"cuda": 2**25}


class LinearRows(Function):
    """y = x Wᵀ + b on [..., in]; `flipped`, y = x W + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Maybe, slots: SlotPair, flipped: bool = False):
        x, weight = x.to(autocast_dtype(x)), weight.to(autocast_dtype(x))
        weight = weight.mT if flipped else weight
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.flipped = slots, flipped
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        if for_weight is not None:
            products = partial(factors, ctx.flipped)
            for_weight.put(partial(write_products, ctx.flipped), g, x, products=products)
        if for_bias is not None:
            for_bias.put(sum_positions, g)
        return (g @ weight if ctx.needs_input_grad[0] else None), None, None, None, None


class EmbeddingRows(Function):
    """Embedding: rows of a table, looked up by index."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, slot: ParameterSlot, padding: int):
        ctx.save_for_backward(numbers)
        ctx.slot, ctx.padding = slot, padding
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        (numbers,) = ctx.saved_tensors
        if ctx.padding >= 0:
            g = g.masked_fill((numbers == ctx.padding)[..., None], 0)
        ctx.slot.put(EmbeddingRows._write, g, numbers, squares=EmbeddingRows._squares)
        return None, None, None, None

    @staticmethod
    def _write(rows: Tensor, g: Tensor, numbers: Tensor) -> None:
        c, size = rows.shape[:2]
        own = numbers.reshape(c, -1)
        g = g.reshape(c, -1, g.shape[-1])
        if own.numel() * size <= _ONE_HOT.get(g.device.type, 0):
            hot = (own[:, None] == torch.arange(size, device=own.device)[:, None]).to(g.dtype)
            rows.copy_(torch.bmm(hot, g).view_as(rows))
            return
        # Every client has its own table of gradients.
        shifted = own + size * torch.arange(c, device=own.device)[:, None]
        rows.copy_(aten.embedding_dense_backward(g, shifted, c * size, -1, False).view_as(rows))

    @staticmethod
    def _squares(g: Tensor, numbers: Tensor) -> Tensor:
        own = numbers.reshape(len(g), 1, -1)
        left = g.reshape(len(g), 1, -1, g.shape[-1])
        same = (own[..., None] == own[..., None, :]).to(g.dtype)  # the inner products of one-hot vectors
        return product_squares(left, left.new_ones(1, 1, 1, 1).expand(*left.shape[:3], 1), same)


class AffineRows(Function):
    """y = x·w + b after a normalisation within one record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Maybe, slots: SlotPair, first: bool):
        """`first`: w belongs to the first dimension after the batch (channels), otherwise to the last dimensions."""
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.first = slots, first
        broad = (lambda p: p.view(-1, *[1] * (x.ndim - 2))) if first else (lambda p: p)
        y = x * broad(weight).to(x.dtype)
        return y if bias is None else y + broad(bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots

        total = sum_channels if ctx.first else sum_positions
        if for_weight is not None:
            for_weight.put(total, g * x)
        if for_bias is not None:
            for_bias.put(total, g)
        broad = weight.view(-1, *[1] * (x.ndim - 2)) if ctx.first else weight
        return (g * broad.to(g.dtype) if ctx.needs_input_grad[0] else None), None, None, None, None


class GroupNormOnHost(Function):
    """GroupNorm with weight, with the fused kernels of PyTorch for the output and the data gradient, on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Maybe, slots: SlotPair, groups: int, eps: float):
        x = x.contiguous()
        ctx.sizes = len(x), x.shape[1], x[0, 0].numel(), groups
        y, mean, inverse = torch.native_group_norm(x, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.slots = slots
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight, mean, inverse = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        g = g.contiguous()
        slopes, images = (part.view(*x.shape[:2], -1) for part in (g, x))
        sums = slopes.sum(2)
        if for_weight is not None:
            channels = x.shape[1] // mean.shape[1]  # in a group
            shift, scale = (part.repeat_interleave(channels, 1) for part in (mean, inverse))
            for_weight.put(sum_positions, (torch.linalg.vecdot(slopes, images) - shift * sums) * scale)
        if for_bias is not None:
            for_bias.put(sum_positions, sums)
        data = None
        if ctx.needs_input_grad[0]:
            needed = [True, False, False]
            data = aten.native_group_norm_backward(g, x, mean, inverse, weight, *ctx.sizes, needed)[0]
        return data, None, None, None, None, None

    @staticmethod
    def fits(x: Tensor, weight: Maybe) -> bool:
        return weight is not None and x.device.type == "cpu" and x.dtype == weight.dtype


class LayerNormRows(Function):
    """LayerNorm with weight, with the fused kernels of PyTorch for the output and the data gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Maybe, slots: SlotPair, eps: float):
        x = x.to(weight.dtype)  # autocast computes norms in full precision
        y, mean, inverse = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.slots = slots
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight, bias, mean, inverse = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        if for_weight is not None:
            for_weight.put(sum_positions, g * ((x - mean) * inverse))
        if for_bias is not None:
            for_bias.put(sum_positions, g)
        data = None
        if ctx.needs_input_grad[0]:
            needed = [True, False, False]
            data = aten.native_layer_norm_backward(g, x, weight.shape, mean, inverse, weight, bias, needed)[0]
        return data, None, None, None, None
