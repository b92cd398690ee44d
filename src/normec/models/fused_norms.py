"""Norm, shortcut, ReLU and pooling in one fused operation, for norms that support it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kernels

Fused = Callable[[nn.Module, Tensor, Tensor | None, nn.Module | None], Tensor | None]
_fused: Fused | None = None


@contextmanager
def fused_by(compute: Fused) -> Iterator[None]:
    """A context in which an engine computes norms without methods of their own, together with what follows them.

    `compute(norm, x, shortcut, pool)` returns relu(norm(x) + shortcut) or pool(relu(norm(x))), or None if it cannot.
    """
    global _fused
    before, _fused = _fused, compute
    try:
        yield
    finally:
        _fused = before


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(x) + shortcut); the fused form needs fewer passes over GPU memory.

    In `fused_by` an engine may compute it, and in `kernels.evaluating` a kernel, for images on a GPU.
    """
    found = _by_kernel(norm, x, shortcut) if kernels.forward_only() else _by_engine(norm, x, shortcut, None)
    if found is None:
        found = norm(x) if shortcut is None else norm(x) + shortcut
        found = F.relu(found)
    return found


def norm_relu_pool(norm: nn.Module, pool: nn.Module, x: Tensor) -> Tensor:
    """pool(relu(norm(x))), fused by a norm with a method `then_pool(x, pool)` or an engine, unless they return None."""
    at_once: Callable[[Tensor, nn.Module], Tensor | None] | None = getattr(norm, "then_pool", None)
    found = at_once(x, pool) if at_once is not None else _by_engine(norm, x, None, pool)
    if found is None:
        found = pool(norm_relu(norm, x))
    return found


def _by_engine(norm: nn.Module, x: Tensor, shortcut: Tensor | None, pool: nn.Module | None) -> Tensor | None:
    if _fused is None or _hooked(norm) or (pool is not None and _hooked(pool)):
        return None
    return _fused(norm, x, shortcut, pool)


def _hooked(module: nn.Module) -> bool:
    """Whether a call of the module may do more than its class does."""
    found = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(found) or "forward" in vars(module)


def _by_kernel(norm: nn.Module, x: Tensor, shortcut: Tensor | None) -> Tensor | None:
    alike = shortcut is None or (shortcut.shape == x.shape and shortcut.dtype == x.dtype)
    small = x.ndim == 4 and 0 < x.numel() < 2**31
    if _hooked(norm) or not alike or not small or not kernels.usable(x) or torch.is_autocast_enabled(x.device.type):
        return None
    x = x.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    if type(norm) is nn.GroupNorm:
        from ..kernels import group_norm

        if group_norm.fits(x.shape[1], norm.num_groups):
            return group_norm.forward(x, norm.num_groups, norm.weight, norm.bias, norm.eps, True, shortcut)[0]
    elif type(norm) is nn.BatchNorm2d and not norm.training:
        from ..kernels import batch_norm

        if norm.running_mean is not None and norm.running_var is not None:
            statistics = norm.running_mean, norm.running_var
            return batch_norm.evaluate(x, norm.weight, norm.bias, statistics, norm.eps, shortcut)
    return None
