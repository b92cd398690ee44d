"""Convolutions with one weight gradient per client; 3×3 convolutions of few channels have their own kernels."""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from ... import kernels
from ...kernels import channels_last, tiles
from ..precision import autocast_dtype
from .slots import GradientSink, Maybe, ParameterSlot, SlotPair, sum_channels

if TYPE_CHECKING:
    from ...kernels.convolution import Moments

aten = torch.ops.aten

_WINDOW_FLOATS = 2**18  # numbers in the windows of images, 1 MiB in float32, that are multiplied at once
_FEW_CHANNELS = 8  # below, the pieces of memory in a window are too short


@dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its input, in the order of PyTorch's arguments."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        output = list(self.output_padding) or [0] * len(self.stride)
        return [*self.stride], [*self.padding], [*self.dilation], self.transposed, output, self.groups


class ConvRows(Function):
    """Convolution over 1, 2 or 3 dimensions, with groups and dilation, also transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Maybe, slots: SlotPair, geometry: Geometry):
        x = x.to(autocast_dtype(x))
        weight = weight.to(x.dtype)
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.geometry = slots, geometry
        bias = None if bias is None else bias.to(x.dtype)
        return aten.convolution(x, weight, bias, *geometry.arguments)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        for_weight, for_bias = ctx.slots
        geometry: Geometry = ctx.geometry
        if for_weight is not None:
            known = x.ndim < 5 and all(map(operator.lt, geometry.output_padding, geometry.stride))
            unfolded = partial(_unfolded, for_weight.shape, geometry) if known else None
            direct = _kernel_for_weights(x, g, for_weight.sink.x.dtype, geometry.groups) or _by_windows(x, geometry)
            direct = direct and not geometry.transposed
            write = partial(_write_weights, geometry, weight.stride())
            for_weight.put(write, g, x, products=unfolded, direct=direct)
        if for_bias is not None:
            for_bias.put(sum_channels, g)
        data = None
        if ctx.needs_input_grad[0]:  # not needed for the first layer
            needed = [True, False, False]
            data = aten.convolution_backward(g, x, weight, None, *geometry.arguments, needed)[0]
        return data, None, None, None, None


def _write_weights(geometry: Geometry, strides: tuple[int, ...], rows: Tensor, g: Tensor, x: Tensor) -> None:
    """Write the weight gradients of equal parts of the records; `strides` are those of the weights."""
    if not geometry.transposed and _kernel_for_weights(x, g, rows.dtype, geometry.groups):
        from ...kernels.weight_gradients import weight_gradients

        exact = not torch.backends.cudnn.allow_tf32
        moves = list(geometry.stride), list(geometry.padding), list(geometry.dilation)
        weight_gradients(channels_last(x), channels_last(g), rows, *moves, exact)
        return
    if len(rows) == len(x) and _by_windows(x, geometry) and not geometry.transposed:
        _write_by_windows(geometry, rows, g, x)
        return
    weight = torch.empty_strided(rows.shape[1:], strides, dtype=x.dtype, device=x.device)  # its values are not read
    parts, needed = len(rows), [False, True, False]
    for row, own_g, own_x in zip(rows, g.chunk(parts), x.chunk(parts), strict=True):
        row.copy_(aten.convolution_backward(own_g, own_x, weight, None, *geometry.arguments, needed)[1])


def _by_windows(x: Tensor, geometry: Geometry) -> bool:
    """Whether `_write_by_windows` is the fastest way to the gradients of single images."""
    return x.device.type == "cpu" and x.ndim == 4 and x.shape[1] >= _FEW_CHANNELS and geometry.groups == 1


def _write_by_windows(geometry: Geometry, rows: Tensor, g: Tensor, x: Tensor) -> None:
    """Write the weight gradient of each image: its output's gradient times the windows of its input.

    In an image whose channels come last, a row of a window is one piece of memory. A few images are taken at a time, so
    that their windows stay in the cache.
    """
    outputs, channels, *size = rows.shape[1:]
    (high, wide), (down, right), (apart, beside) = geometry.padding, geometry.stride, geometry.dilation
    positions = g[0, 0].numel()
    at_once = max(1, _WINDOW_FLOATS // (positions * channels * math.prod(size)))
    image = x.new_zeros(min(at_once, len(x)), x.shape[2] + 2 * high, x.shape[3] + 2 * wide, channels)
    whole, row, column, _ = image.stride()
    strides = whole, row * down, column * right, row * apart, column * beside, 1
    view = image.as_strided((len(image), *g.shape[2:], *size, channels), strides)
    windows = torch.empty(view.shape, dtype=x.dtype)
    for start in range(0, len(x), at_once):
        part = slice(start, start + at_once)
        count = len(x[part])
        image[:count, high : high + x.shape[2], wide : wide + x.shape[3]] = x[part].movedim(1, -1)
        windows[:count] = view[:count]
        found = g[part].reshape(count, outputs, -1) @ windows[:count].view(count, positions, -1)
        rows[part] = found.view(count, outputs, *size, channels).movedim(-1, 2)


def _unfolded(shape: torch.Size, geometry: Geometry, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a record's weight gradient, ``[records, groups, positions, ·]``.

    The gradient is the product of the output's gradient with the windows of the input. In a transposed convolution,
    input and output change places.
    """
    outer, windowed = (x, g) if geometry.transposed else (g, x)
    moves = [shape[2:], geometry.dilation, geometry.padding, geometry.stride]
    if outer.ndim == 3:  # `windows_of` is for images
        outer, windowed = outer[..., None, :], windowed[..., None, :]
        moves = [(first, *move) for first, move in zip((1, 1, 0, 1), moves, strict=True)]
    n, groups = len(outer), geometry.groups
    windows = windows_of(windowed, *moves)
    left, right = (part.reshape(n, groups, part.shape[1] // groups, -1).mT for part in (outer, windows))
    return left, right


def windows_of(
    x: Tensor, size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return what `F.unfold` does, by one copy of a view.

    On a GPU `F.unfold` launches a kernel for each image, and on a CPU it takes up to twice as long.
    """
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).contiguous()
    records, channels, *seen = x.shape
    counts = [
        (whole - apart * (width - 1) - 1) // step + 1
        for whole, width, apart, step in zip(seen, size, dilation, stride, strict=True)
    ]
    image, channel, row, column = x.stride()
    strides = image, channel, row * dilation[0], column * dilation[1], row * stride[0], column * stride[1]
    view = x.as_strided((records, channels, *size, *counts), strides)
    return view.reshape(records, channels * math.prod(size), math.prod(counts))


class TiledConvRows(Function):
    """A 3×3 convolution of few channels in half precision on a GPU; the sink provides its packed weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Maybe,
        slots: tuple[ParameterSlot, ParameterSlot | None],
        stride: int,
        moments: Moments | None,
    ):
        """`weight` is passed so that autograd records the layer (see `ParameterSlot.value`); `moments` are filled."""
        from ...kernels.convolution import convolve, widened

        x = widened(x, autocast_dtype(x))
        ctx.save_for_backward(x)
        ctx.slots, ctx.stride, slot = slots, stride, slots[0]
        way = tiles.forward(slot.shape[1], slot.shape[0], stride)
        packed, size = slot.sink.packed(x.dtype, slot, way), tiles.size(x.shape[2:], stride)
        return convolve(x, packed, way, size, moments, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels.convolution import convolve

        (x,), (slot, for_bias), g = ctx.saved_tensors, ctx.slots, channels_last(g)
        slot.put(partial(_write_tiles, ctx.stride), g, x)
        if for_bias is not None:
            for_bias.put(sum_channels, g)
        data = None
        if ctx.needs_input_grad[0]:  # not needed for the first layer
            way = tiles.backward(slot.shape[1], slot.shape[0], ctx.stride)
            data = convolve(g, slot.sink.packed(g.dtype, slot, way), way, tuple(x.shape[2:]))
        return data, *[None] * 5

    @staticmethod
    def moments(x: Tensor, slot: ParameterSlot, stride: int) -> Moments | None:
        """Return storage for the moments of the output if a BatchNorm may use them, else None."""
        from ...kernels.convolution import moments_of

        way = tiles.forward(slot.shape[1], slot.shape[0], stride)
        size, sink = tiles.size(x.shape[2:], stride), slot.sink
        return moments_of(x, way, size, sink.clients) if sink.normed else None

    @staticmethod
    def prepare(module: nn.Module, slot: ParameterSlot | None) -> bool:
        """Return whether this kernel suits the layer; if so, register its weights for packing."""
        if slot is None or not isinstance(module, nn.Conv2d) or module.groups > 1:
            return False
        if module.padding_mode != "zeros" or max(module.in_channels, module.out_channels) > tiles.MOST:
            return False
        if not tiles.suits(module.kernel_size, module.stride, module.padding, module.dilation):
            return False
        for way in (tiles.forward, tiles.backward):
            slot.sink.packing.add(slot.start, way(module.in_channels, module.out_channels, module.stride[0]))
        return True

    @staticmethod
    def fits(x: Tensor, sink: GradientSink, outputs: int) -> bool:
        """Whether the kernels can run on these images."""
        half = autocast_dtype(x) in (torch.bfloat16, torch.float16) and sink.x.dtype == torch.float32
        numbers = x[:, 0].numel() * max(x.shape[1], outputs, tiles.LEAST) if x.ndim == 4 else 0
        return half and 0 < numbers < 2**31 and kernels.usable(x)


def _write_tiles(stride: int, rows: Tensor, g: Tensor, x: Tensor) -> None:
    """Write the weight gradients of equal parts of the records; x is `kernels.convolution.widened`."""
    from ...kernels.weight_gradients import of_tiles, weight_gradients

    if g.dtype == rows.dtype:  # clipped records without a table
        moves = [stride, stride], [1, 1], [1, 1]
        weight_gradients(channels_last(x[:, : rows.shape[2]]), channels_last(g), rows, *moves, True)
    else:
        of_tiles(x, g, rows, stride)


def _kernel_for_weights(x: Tensor, g: Tensor, dtype: torch.dtype, groups: int) -> bool:
    """Whether the kernel can write weight gradients of this dtype."""
    return x.ndim == 4 and groups == 1 and dtype == torch.float32 and kernels.usable(x, g)
