"""Layers under vmap in which every client has weights of its own, by kernels on a GPU.

vmap makes a grouped convolution of the clients' convolutions, and a norm of many small operations; both take several
times as long. Max pooling, which has no weights, is here because its kernels keep channels last. What a model computes
by `models.norm_relu` and `models.norm_relu_pool` is one kernel, as in the shared pass.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc, call-arg, arg-type"
# (autograd's Function is untyped: forward and backward take what each layer needs)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import kernels
from ..kernels import channels_last, tiles
from ..kernels.tiles import Tiles
from ..models.fused_norms import fused_by
from .precision import autocast_dtype
from .shared.pooling import AdaptiveMaxPoolByKernel, MaxPoolByKernel, both

if TYPE_CHECKING:
    from ..kernels.own_convolution import Moves


@contextmanager
def own_weights() -> Iterator[None]:
    """A context for the call of vmap over clients, in which kernels compute the layers that they suit."""
    with fused_by(_after_norm), _Layers():
        yield


class _Layers(TorchFunctionMode):
    """Computes layers by kernels where these suit them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, by_kernel = kwargs or {}, _BY_KERNEL.get(func)
        found = by_kernel(*args, **kwargs) if by_kernel is not None else None
        return func(*args, **kwargs) if found is None else found


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if groups > 1 or isinstance(padding, str) or not _suit(input, weight):
        return None
    found: Tensor = _Convolution.apply(input, weight, bias, (both(stride), both(padding), both(dilation)))
    return found


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    if weight is None or bias is None or not _suit(input, weight):
        return None
    from ..kernels import group_norm

    if not group_norm.fits(input.shape[1], num_groups):
        return None
    found: Tensor = _GroupNorm.apply(input, None, weight, bias, num_groups, eps, False)[0]
    return found


def _after_norm(norm: nn.Module, x: Tensor, shortcut: Tensor | None, pool: nn.Module | None) -> Tensor | None:
    """A GroupNorm with what follows it in one kernel: a shortcut and ReLU, or ReLU and 2×2 pooling."""
    alike = shortcut is None or (shortcut.shape == x.shape and shortcut.dtype == x.dtype and _suit(shortcut))
    if type(norm) is not nn.GroupNorm or norm.weight is None or norm.bias is None or not alike:
        return None
    if not _suit(x, norm.weight, norm.bias):
        return None
    from ..kernels import group_norm, group_norm_pool

    if not group_norm.fits(x.shape[1], norm.num_groups):
        return None
    scales = norm.weight, norm.bias, norm.num_groups, norm.eps
    found: Tensor
    if pool is None:
        found = _GroupNorm.apply(x, shortcut, *scales, True)[0]
        return found
    squares = type(pool) is nn.MaxPool2d and MaxPoolByKernel.fits(x, pool) and group_norm_pool.fits(tuple(x.shape))
    if not squares:
        return None
    found = _GroupNormPool.apply(x, *scales)[0]
    return found


def _max_pool(input: Tensor, *sizes: Any, **options: Any) -> Tensor | None:
    if not _suit(input) or not MaxPoolByKernel.fits(input, nn.MaxPool2d(*sizes, **options)):
        return None
    found: Tensor = _Pool.apply(input, None)[0]
    return found


def _adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor | None:
    if not _suit(input) or not AdaptiveMaxPoolByKernel.fits(input, nn.AdaptiveMaxPool2d(output_size, return_indices)):
        return None
    found: Tensor = _Pool.apply(input, both(output_size))[0]
    return found


# A model may name the arguments, so the functions above have the names of torch's own.
_BY_KERNEL: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: _convolution,
    F.group_norm: _group_norm,
    F.max_pool2d: _max_pool,
    F.adaptive_max_pool2d: _adaptive_max_pool,
}


def _suit(x: Tensor, *weights: Tensor) -> bool:
    """Whether kernels can run on the images of all clients."""
    return x.ndim == 4 and kernels.usable(x, *weights) and 0 < _numbers(x) < 2**31


def _numbers(x: Tensor) -> int:
    """Return how many numbers a tensor has for all clients together; 0 if it is the same for all of them."""
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    return get_unwrapped(x).numel() if is_batchedtensor(x) else 0


class _Rule(Function):
    """A function that is only called under vmap; it has no second derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for a backward pass: the subclasses that are gradients have none."""


class _Convolution(_Rule):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, weight, _, ctx.moves = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight = ctx.saved_tensors
        data = weights = bias = None
        if ctx.needs_input_grad[0]:  # not needed for the first layer
            data = _ConvolutionInput.apply(g, x, weight, ctx.moves)
        if ctx.needs_input_grad[1]:
            weights = _ConvolutionWeight.apply(g, x, weight, ctx.moves)
        if ctx.needs_input_grad[2]:
            bias = g.sum((0, 2, 3), dtype=weight.dtype)
        return data, weights, bias, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, moves: Moves):
        x, weight, bias = _by_client(info, in_dims, x, weight, bias)
        kind = autocast_dtype(x)
        if _tiled(kind, x, weight, moves):
            from ..kernels.convolution import convolve, widened

            stride, (outputs, inputs) = moves[0][0], weight.shape[1:3]
            way, images = tiles.forward(inputs, outputs, stride), widened(x.flatten(0, 1), kind)
            own_bias = None if bias is None else bias.contiguous()
            size = tiles.size(images.shape[2:], stride)
            return _apart(info, convolve(images, _packed(weight, way, kind), way, size, bias=own_bias)), 0
        from ..kernels.own_convolution import forward

        return _apart(info, forward(_together(x.to(kind)), weight.to(kind), bias, moves)), 0


class _ConvolutionInput(_Rule):
    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, x: Tensor, weight: Tensor, moves: Moves):
        g, x, weight = _by_client(info, in_dims, g, x, weight)
        if _tiled(g.dtype, x, weight, moves):
            from ..kernels.convolution import convolve

            way = tiles.backward(weight.shape[2], weight.shape[1], moves[0][0])
            found = convolve(_together(g), _packed(weight, way, g.dtype), way, tuple(x.shape[3:]))
            return _apart(info, found).to(x.dtype), 0
        from ..kernels.own_convolution import input_gradient

        found = input_gradient(_together(g), weight.to(g.dtype), moves, tuple(x.shape[3:]))
        return _apart(info, found).to(x.dtype), 0


class _ConvolutionWeight(_Rule):
    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, x: Tensor, weight: Tensor, moves: Moves):
        from ..kernels.weight_gradients import of_tiles, weight_gradients

        g, x, weight = _by_client(info, in_dims, g, x, weight)
        rows = torch.empty(weight.shape, device=weight.device)
        if _tiled(g.dtype, x, weight, moves):
            from ..kernels.convolution import widened

            of_tiles(widened(x.flatten(0, 1), g.dtype), _together(g), rows, moves[0][0])
            return rows.to(weight.dtype), 0
        exact = not torch.backends.cudnn.allow_tf32
        weight_gradients(_together(x.to(g.dtype)), _together(g), rows, *map(list, moves), exact)
        return rows.to(weight.dtype), 0


class _GroupNorm(_Rule):
    """GroupNorm; with `relu` relu(norm(x) + shortcut), where the shortcut may be None."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, shortcut, weight, bias, ctx.groups, _, ctx.relu), (y, mean, inverse) = inputs, output
        ctx.mark_non_differentiable(mean, inverse)
        ctx.save_for_backward(x, weight, bias, mean, inverse, *(() if shortcut is None else (y,)))

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any):
        x, weight, bias, mean, inverse, *y = ctx.saved_tensors
        found = _GroupNormGradient.apply(g, x, weight, bias, mean, inverse, y[0] if y else None, ctx.groups, ctx.relu)
        data, by_weight, by_bias, *passed = found
        return data, passed[0] if passed else None, by_weight, by_bias, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        relu: bool,
    ):
        from ..kernels import group_norm

        x, shortcut, weight, bias = _by_client(info, in_dims, x, shortcut, weight, bias)
        after = None if shortcut is None else _together(shortcut)
        found = group_norm.forward(_together(x), groups, weight.contiguous(), bias.contiguous(), eps, relu, after)
        return tuple(_apart(info, one) for one in found), (0, 0, 0)


class _GroupNormGradient(_Rule):
    """The gradients of x, weight, bias and, if the output y is given, of the shortcut."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any):
        from ..kernels import group_norm

        *tensors, groups, relu = given
        g, x, weight, bias, mean, inverse, y = _by_client(info, in_dims, *tensors)
        scales, moments = (weight.contiguous(), bias.contiguous()), (mean.flatten(0, 1), inverse.flatten(0, 1))
        after = None if y is None else _together(y)
        data, sums, passed = group_norm.backward(_together(g), _together(x), groups, *scales, *moments, relu, after)
        images = (data,) if passed is None else (data, passed)
        data, *others = (_apart(info, one) for one in images)
        return (data, *_sums_by_client(sums, *scales), *others), (0,) * (2 + len(images))


class _GroupNormPool(_Rule):
    """GroupNorm, ReLU and 2×2 max pooling."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, weight, bias, ctx.groups, _), (_, mean, inverse) = inputs, output
        ctx.mark_non_differentiable(mean, inverse)
        ctx.save_for_backward(x, weight, bias, mean, inverse)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any):
        return *_GroupNormPoolGradient.apply(g, *ctx.saved_tensors, ctx.groups), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float):
        from ..kernels import group_norm_pool

        x, weight, bias = _by_client(info, in_dims, x, weight, bias)
        found = group_norm_pool.forward(_together(x), groups, weight.contiguous(), bias.contiguous(), eps)
        return tuple(_apart(info, one) for one in found), (0, 0, 0)


class _GroupNormPoolGradient(_Rule):
    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any):
        from ..kernels import group_norm_pool

        *tensors, groups = given
        g, x, weight, bias, mean, inverse = _by_client(info, in_dims, *tensors)
        scales, moments = (weight.contiguous(), bias.contiguous()), (mean.flatten(0, 1), inverse.flatten(0, 1))
        data, sums = group_norm_pool.backward(_together(g), _together(x), groups, *scales, *moments)
        return (_apart(info, data), *_sums_by_client(sums, *scales)), (0, 0, 0)


class _Pool(_Rule):
    """2×2 pooling, or adaptive pooling to a size."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, ctx.size), (_, indices) = inputs, output
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.shape = tuple(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any):
        return _PoolGradient.apply(g, *ctx.saved_tensors, ctx.shape, ctx.size), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, size: tuple[int, int] | None):
        from ..kernels.pooling import adapt, pool

        (x,) = _by_client(info, in_dims, x)
        found = pool(_together(x)) if size is None else adapt(_together(x), *size)
        return tuple(_apart(info, one) for one in found), (0, 0)


class _PoolGradient(_Rule):
    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, indices: Tensor, shape: tuple[int, ...], size: tuple[int, int] | None):
        from ..kernels.pooling import adapt_back, unpool

        g, indices = _by_client(info, in_dims, g, indices)
        back = unpool if size is None else adapt_back
        images = info.batch_size * shape[0]
        return _apart(info, back(_together(g), _together(indices), (images, *shape[1:]))), 0


RULES: tuple[type, ...] = (
    _Convolution,
    _ConvolutionInput,
    _ConvolutionWeight,
    _GroupNorm,
    _GroupNormGradient,
    _GroupNormPool,
    _GroupNormPoolGradient,
    _Pool,
    _PoolGradient,
)  # every function with a vmap rule, for `RefuseOwnVmapRules`


def _tiled(kind: torch.dtype, x: Tensor, weight: Tensor, moves: Moves) -> bool:
    """Whether the kernels of `kernels.convolution` suit a convolution of x with these weights of every client."""
    (stride, padding, dilation), (_, outputs, inputs, *kernel) = moves, weight.shape
    half = kind in (torch.bfloat16, torch.float16) and weight.dtype == torch.float32
    if not half or max(outputs, inputs) > tiles.MOST or not tiles.suits(tuple(kernel), stride, padding, dilation):
        return False
    return stride[0] == stride[1] and x[:, :, 0].numel() * max(inputs, outputs, tiles.LEAST) < 2**31


def _packed(weight: Tensor, way: Tiles, dtype: torch.dtype) -> Tensor:
    """Return the weights of every client in the order of their kernel."""
    from ..kernels.convolution import pack

    return pack(weight.flatten(1), _table(way, weight.device), dtype)


@cache
def _table(way: Tiles, device: torch.device) -> Tensor:
    return way.table(0).flatten().to(device)


def _sums_by_client(sums: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scales of every client, from those of single images."""
    from ..kernels import group_norm

    by_weight, by_bias = torch.empty_like(weight), torch.empty_like(bias)
    group_norm.by_client(sums, by_weight, by_bias)
    return by_weight, by_bias


def _by_client(info: Any, in_dims: Any, *given: Tensor | None) -> Iterator[Any]:
    """Yield the tensors with clients first; one that is the same for all clients is repeated."""
    for one, dim in zip(given, in_dims, strict=False):
        if one is None:
            yield None
        else:
            yield one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)


def _together(images: Tensor) -> Tensor:
    """Return the images of all clients one after the other, channels last."""
    return channels_last(images.flatten(0, 1))


def _apart(info: Any, images: Tensor) -> Tensor:
    """Return images that `_together` has joined, client by client."""
    found: Tensor = images.unflatten(0, (info.batch_size, -1))
    return found
