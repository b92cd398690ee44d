"""Fused GPU kernels in Triton. Each computes the same as a few lines of PyTorch, in fewer passes over memory.

`usable` and the `fits` functions say whether a kernel applies, which depends on the device, Triton, the dtype and the
layout. Otherwise the caller uses PyTorch, which is the definition; the tests compare the kernels with it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
_evaluating = False


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether kernels can run on these tensors: on a GPU (or in Triton's interpreter), in a supported precision.

    A dispatch mode, such as that of a tracer, does not see a launch by Triton, so there are no kernels inside one.
    """
    if not _installed() or torch._C._len_torch_dispatch_stack():
        return False
    # Triton launches on the current device, whatever the device of the arguments is.
    here = all(t.is_cuda and t.device.index == torch.cuda.current_device() for t in tensors)
    somewhere = here or os.environ.get("TRITON_INTERPRET") == "1"
    return somewhere and all(t.dtype in _PRECISIONS for t in tensors)


@contextmanager
def evaluating() -> Iterator[None]:
    """A context in which models without gradients may use kernels that have no backward; see `models.norm_relu`."""
    global _evaluating
    before, _evaluating = _evaluating, True
    try:
        yield
    finally:
        _evaluating = before


def forward_only() -> bool:
    """Whether kernels without a backward may be used: inside `evaluating`, while no gradients are recorded."""
    return _evaluating and not torch.is_grad_enabled()


def channels_last(x: Tensor) -> Tensor:
    """Return images with channels last in memory, which is how kernels read them."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()


def blank(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised images with channels last."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def pointer(given: Tensor | None, other: Tensor) -> Tensor:
    """Return `given`, or `other` as a placeholder, because a kernel needs a tensor for every argument."""
    return other if given is None else given


def scales(weight: Tensor | None, bias: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a norm's weight and bias for its kernels, which use both or neither; a missing bias is zero."""
    if weight is None:
        return other, other
    return weight, torch.zeros_like(weight) if bias is None else bias
