"""GroupNorm and BatchNorm with one gradient of weight and bias per client; BatchNorm uses each client's statistics.

Their kernels also compute what often follows a norm: the addition of a shortcut and ReLU (`lazy_norms`), and for
GroupNorm the 2×2 max pooling as well (`models.norm_relu_pool`). Without pooling, the output is returned twice, for two
uses.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ... import kernels
from ...kernels import channels_last
from .pooling import MaxPoolByKernel
from .slots import Maybe, SlotPair, filled, sum_positions

if TYPE_CHECKING:
    from ...kernels.convolution import Moments

aten = torch.ops.aten


class GroupNormRows(Function):
    """GroupNorm of channels-last images on a GPU, with one kernel forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Maybe,
        weight: Maybe,
        bias: Maybe,
        slots: SlotPair,
        groups: int,
        eps: float,
        relu: bool,
    ):
        from ...kernels import group_norm

        x = channels_last(x)
        y, mean, inverse = group_norm.forward(x, groups, weight, bias, eps, relu, _maybe_last(shortcut))
        ctx.save_for_backward(x, weight, bias, mean, inverse, y if shortcut is not None else None)
        ctx.slots, ctx.groups, ctx.relu = slots, groups, relu
        return _twice(ctx, y)

    @staticmethod
    def backward(ctx: Any, *slopes: Maybe):
        from ...kernels import group_norm

        g, also = _slopes(slopes)
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        x, weight, bias, mean, inverse, y = ctx.saved_tensors
        data, sums, passed = group_norm.backward(
            channels_last(g), x, ctx.groups, weight, bias, mean, inverse, ctx.relu, y, _maybe_last(also)
        )
        _write_affine_gradients(ctx.slots, sums)
        return data, passed, *[None] * 6

    @staticmethod
    def fits(x: Tensor, groups: int) -> bool:
        if x.ndim != 4 or not kernels.usable(x):
            return False
        from ...kernels import group_norm

        return group_norm.fits(x.shape[1], groups)


class GroupNormPoolRows(Function):
    """GroupNorm, ReLU and 2×2 max pooling."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Maybe, bias: Maybe, slots: SlotPair, norm: nn.GroupNorm):
        from ...kernels import group_norm_pool

        x = channels_last(x)
        y, mean, inverse = group_norm_pool.forward(x, norm.num_groups, weight, bias, norm.eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.slots, ctx.groups = slots, norm.num_groups
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        from ...kernels import group_norm_pool

        x, weight, bias, mean, inverse = ctx.saved_tensors
        data, sums = group_norm_pool.backward(channels_last(g), x, ctx.groups, weight, bias, mean, inverse)
        _write_affine_gradients(ctx.slots, sums)
        return data, None, None, None, None

    @staticmethod
    def fits(x: Tensor, norm: nn.GroupNorm, pool: nn.Module) -> bool:
        if type(pool) is not nn.MaxPool2d or not MaxPoolByKernel.fits(x, pool):
            return False
        if not GroupNormRows.fits(x, norm.num_groups):
            return False
        from ...kernels import group_norm_pool

        return group_norm_pool.fits(tuple(x.shape))


def _write_affine_gradients(slots: SlotPair, sums: Tensor) -> None:
    """Write the gradients of weight and bias, from sums over single images."""
    from ...kernels import group_norm

    for_one = next((slot for slot in slots if slot is not None), None)
    if for_one is not None and for_one.sink.by_record:
        for slot, part in zip(slots, sums.unbind(1), strict=True):
            if slot is not None:
                slot.put(sum_positions, part)
    elif for_one is not None:
        with filled(slots, sums.new_empty(for_one.sink.clients, sums.shape[-1])) as rows:
            group_norm.by_client(sums, *rows)


class BatchNormRows(Function):
    """BatchNorm in training mode with each client's statistics; running statistics are updated row by row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Maybe,
        weight: Maybe,
        bias: Maybe,
        slots: SlotPair,
        running: tuple[Tensor, Tensor] | None,
        clients: int,
        momentum: float,
        eps: float,
        relu: bool,
        moments: Moments | None = None,
    ):
        """`shortcut`, `relu` and `moments` (of x, if known) are allowed only if `BatchNormRows.fits`."""
        ctx.slots, ctx.clients, ctx.eps, ctx.relu = slots, clients, eps, relu
        if BatchNormRows.fits(x, clients):
            from ...kernels import batch_norm

            x = channels_last(x)
            y, mean, inverse = batch_norm.forward(
                x, weight, bias, running, clients, momentum, eps, relu, _maybe_last(shortcut), moments
            )
        else:
            y, means, inverses = torch.empty_like(x), [], []
            for client, (own, out) in enumerate(zip(x.chunk(clients), y.chunk(clients), strict=True)):
                rows = (running[0][client], running[1][client]) if running is not None else (None, None)
                normed, own_mean, own_inverse = torch.native_batch_norm(own, weight, bias, *rows, True, momentum, eps)
                out.copy_(normed)
                means.append(own_mean)
                inverses.append(own_inverse)
            mean, inverse = torch.stack(means), torch.stack(inverses)
        ctx.save_for_backward(x, weight, bias, mean, inverse, y if shortcut is not None else None)
        return _twice(ctx, y)

    @staticmethod
    def backward(ctx: Any, *slopes: Maybe):
        g, also = _slopes(slopes)
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        x, weight, bias, mean, inverse, y = ctx.saved_tensors
        c, passed = ctx.clients, None
        with filled(ctx.slots, torch.empty_like(mean)) as rows:
            if BatchNormRows.fits(x, c):
                from ...kernels import batch_norm

                g, also = channels_last(g), _maybe_last(also)
                data, passed = batch_norm.backward(g, x, weight, bias, mean, inverse, *rows, ctx.relu, y, also)
            else:
                data = torch.empty_like(x)
                for client, (own_g, own_x, out) in enumerate(zip(g.chunk(c), x.chunk(c), data.chunk(c), strict=True)):
                    statistics = (None, None, mean[client], inverse[client])
                    found = aten.native_batch_norm_backward(
                        own_g, own_x, weight, *statistics, True, ctx.eps, [True, True, True]
                    )
                    out.copy_(found[0])
                    if weight is not None:
                        rows[0][client], rows[1][client] = found[1], found[2]
        return data, passed, *[None] * 9

    @staticmethod
    def fits(x: Tensor, clients: int) -> bool:
        """Whether the kernels can run on x; they index the numbers of a client with 32 bits."""
        return x.ndim in (2, 4) and x.numel() // clients < 2**31 and kernels.usable(x)


def _twice(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output for two uses; their gradients then arrive separately, and a kernel adds them while reading."""
    ctx.set_materialize_grads(False)
    return y, y.detach()


def _slopes(slopes: tuple[Maybe, ...]) -> tuple[Maybe, Maybe]:
    """Return the gradient of the first or only use, and that of the second use; None if there is none."""
    first, second = slopes
    return (first, second) if first is not None else (second, None)


def _maybe_last(x: Maybe) -> Maybe:
    return None if x is None else channels_last(x)
