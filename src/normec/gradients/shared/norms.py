"""GroupNorm and BatchNorm with one scale's gradient a client; BatchNorm with every client's own statistics.

By their kernels they also do what often follows them, `models.norm_relu`: the addition of a shortcut, and ReLU.
What they make comes twice, for two uses: see `models.second`.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ... import kernels
from .layers import channels_last
from .slots import Slot

if TYPE_CHECKING:
    from ...kernels.convolution import Moments

aten = torch.ops.aten

Maybe = Tensor | None
Slots = tuple[Slot | None, Slot | None]  # of weight and bias


class GroupNormRows(Function):
    """GroupNorm by one kernel each way; for channels-last images on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Maybe, weight: Maybe, bias: Maybe, slots: Slots, norm: nn.GroupNorm, relu: bool
    ):
        from ...kernels import group_norm

        x = channels_last(x)
        y, mean, inverse = group_norm.forward(x, norm.num_groups, weight, bias, norm.eps, relu, _maybe_last(shortcut))
        ctx.save_for_backward(x, weight, bias, mean, inverse, y if shortcut is not None else None)
        ctx.slots, ctx.groups, ctx.relu = slots, norm.num_groups, relu
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
        for part, slot in enumerate(ctx.slots):
            if slot is not None:
                own = sums.view(slot.sink.clients, -1, *sums.shape[1:])[:, :, part]
                slot.put(lambda rows, own=own: torch.sum(own, 1, out=rows))
        return data, passed, None, None, None, None, None

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
        shortcut: Maybe,
        weight: Maybe,
        bias: Maybe,
        slots: Slots,
        running: tuple[Tensor, Tensor] | None,
        clients: int,
        momentum: float,
        eps: float,
        relu: bool,
        moments: Moments | None = None,
    ):
        """`shortcut`, `relu` and `moments`, x's, where they are known: only where `BatchNormRows.fits` the kernel."""
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
        by_weight, by_bias = (slot.rows if slot is not None else torch.empty_like(mean) for slot in ctx.slots)
        before = [slot.rows.clone() if slot is not None and slot.written else None for slot in ctx.slots]
        if BatchNormRows.fits(x, c):
            from ...kernels import batch_norm

            g, also = channels_last(g), _maybe_last(also)
            data, passed = batch_norm.backward(g, x, weight, bias, mean, inverse, by_weight, by_bias, ctx.relu, y, also)
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
        return data, passed, *[None] * 9

    @staticmethod
    def fits(x: Tensor, clients: int) -> bool:
        """Whether the kernels may run on these: they count a client's numbers in 32 bits."""
        return x.ndim in (2, 4) and x.numel() // clients < 2**31 and kernels.usable(x)


def _twice(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """What is made, for two uses: their slopes then come apart, and a kernel adds them up as it reads them."""
    ctx.set_materialize_grads(False)
    return y, y.detach()


def _slopes(slopes: tuple[Maybe, ...]) -> tuple[Maybe, Maybe]:
    """That of the first use, or the only one, and perhaps another; None where nothing asks."""
    first, second = slopes
    return (first, second) if first is not None else (second, None)


def _maybe_last(x: Maybe) -> Maybe:
    return None if x is None else channels_last(x)
