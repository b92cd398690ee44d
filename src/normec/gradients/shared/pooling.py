"""Layers without parameters that have kernels of their own: max pooling and the shortcuts of a residual network."""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd import Function

from ... import kernels
from ...kernels import channels_last

if TYPE_CHECKING:
    from ...models.resnet import Shortcut

_WINDOW = 64  # the most pixels of a window for which a kernel is unrolled


class ShortcutByKernel(Function):
    """A `Shortcut` of channels-last images on a GPU, with one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Shortcut):
        from ...kernels.shortcut import pick

        ctx.shape, ctx.shortcut = tuple(x.shape), shortcut
        return pick(channels_last(x), shortcut.stride, shortcut.before, x.shape[1] + shortcut.missing)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels.shortcut import spread

        return spread(channels_last(g), ctx.shape, ctx.shortcut.stride, ctx.shortcut.before), None

    @staticmethod
    def fits(x: Tensor, shortcut: Shortcut) -> bool:
        numbers = x[:, 0].numel() * (x.shape[1] + shortcut.missing) if x.ndim == 4 else 0
        return shortcut.missing > 0 and 0 < numbers < 2**31 and kernels.usable(x)


class MaxPoolByKernel(Function):
    """`nn.MaxPool2d(2)` of channels-last images on a GPU, with one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor):
        from ...kernels.pooling import pool

        y, indices = pool(channels_last(x))
        ctx.save_for_backward(indices)
        ctx.shape = tuple(x.shape)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels.pooling import unpool

        return unpool(channels_last(g), *ctx.saved_tensors, ctx.shape)

    @staticmethod
    def fits(x: Tensor, module: nn.MaxPool2d) -> bool:
        square = all(both(size) == (2, 2) for size in (module.kernel_size, module.stride))
        plain = both(module.padding) == (0, 0) and both(module.dilation) == (1, 1)
        plain = plain and not module.ceil_mode and not module.return_indices
        fits = x.ndim == 4 and min(x.shape[2:]) > 1 and 0 < x.numel() < 2**31
        return square and plain and fits and kernels.usable(x)


class AdaptiveMaxPoolByKernel(Function):
    """`nn.AdaptiveMaxPool2d` of channels-last images on a GPU; unlike PyTorch's, its backward sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.AdaptiveMaxPool2d):
        from ...kernels.pooling import adapt

        y, indices = adapt(channels_last(x), *both(module.output_size))
        ctx.save_for_backward(indices)
        ctx.shape = tuple(x.shape)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels.pooling import adapt_back

        return adapt_back(channels_last(g), *ctx.saved_tensors, ctx.shape), None

    @staticmethod
    def fits(x: Tensor, module: nn.AdaptiveMaxPool2d) -> bool:
        sizes = both(module.output_size)
        if x.ndim != 4 or module.return_indices or None in sizes or not 0 < x.numel() < 2**31 or not kernels.usable(x):
            return False
        from ...kernels.pooling import largest_window

        smaller = all(0 < size <= given for size, given in zip(sizes, x.shape[2:], strict=True))
        return smaller and math.prod(largest_window(*x.shape[2:], *sizes)) <= _WINDOW


def both(size: Any) -> tuple[int, int]:
    """Return a size for each of two directions."""
    return (size, size) if isinstance(size, int) else tuple(size)
