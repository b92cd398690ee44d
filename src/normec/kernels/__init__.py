"""Fused GPU kernels in Triton. Each does what a few lines of PyTorch do, in fewer passes over memory.

Every function here returns None or False where it does not apply (no GPU, no Triton, another dtype or layout), and the
caller then takes the plain way: that one is the definition, and the tests hold the kernel against it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_evaluating = False


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether kernels may run on these: on a GPU (or in Triton's interpreter), in a precision they know."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    # Triton launches on the current device, whatever its arguments' is.
    here = all(t.is_cuda and t.device.index == torch.cuda.current_device() for t in tensors)
    somewhere = here or os.environ.get("TRITON_INTERPRET") == "1"
    return somewhere and _installed() and all(t.dtype in known for t in tensors)


@contextmanager
def evaluating() -> Iterator[None]:
    """Within, a model that is not asked for gradients may use kernels that know of none: see `models.norm_relu`."""
    global _evaluating
    before, _evaluating = _evaluating, True
    try:
        yield
    finally:
        _evaluating = before


def forward_only() -> bool:
    return _evaluating and not torch.is_grad_enabled()


def blank(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for images, channels last."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def pointer(given: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants a tensor for every argument, also for one that it does not use."""
    return other if given is None else given


def scales(weight: Tensor | None, bias: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight and bias as its kernels take them: both, or neither is used; a lone weight's bias is zero."""
    if weight is None:
        return other, other
    return weight, torch.zeros_like(weight) if bias is None else bias
