"""The precision of the matrix products in gradients; x, memories and messages always have the run's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    """Return a context in which forward passes use bfloat16 if `precision` is "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would compute with x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Choose the kernels that a GPU uses, and whether they may round float32 inputs to TF32's 10 bits.

    A CPU never rounds them, whatever `torch.set_float32_matmul_precision` says: messages and the gradients of single
    records are added up by products, and what is added must be no longer than what was measured.
    """
    with _consistent_settings():
        yield from _products(precision)


def _products(precision: Precision) -> Iterator[None]:
    matmul, tf32 = torch.backends.cuda.matmul, precision != "float32"
    before = matmul.allow_tf32
    on_cpu = [(kind, kind.fp32_precision) for kind in _rounding_kinds()]
    matmul.allow_tf32 = tf32
    try:
        for kind, _ in on_cpu:
            kind.fp32_precision = "ieee"
        # Deterministic kernels, the same ones every time; `benchmark` would choose by measured times.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        for kind, usual in on_cpu:
            kind.fp32_precision = usual
        matmul.allow_tf32 = before


@contextmanager
def _consistent_settings() -> Iterator[None]:
    """Let PyTorch show `allow_tf32`, which it refuses beside most values of `fp32_precision`."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    try:
        consistent = getattr(backends, "fp32_precision", "none") == "none"
        consistent = consistent and isinstance(matmul.allow_tf32, bool) and isinstance(cudnn.allow_tf32, bool)
    except RuntimeError:
        consistent = False
    if consistent:
        yield
        return
    kinds = [backends, matmul, cudnn.conv, cudnn.rnn]
    before = [kind.fp32_precision for kind in kinds]
    backends.fp32_precision, matmul.allow_tf32, cudnn.allow_tf32 = "none", False, True
    try:
        yield
    finally:
        matmul.fp32_precision = "none"  # that of all backends
        for kind, usual in zip(kinds, before, strict=True):
            if kind.fp32_precision != usual:
                kind.fp32_precision = usual


def _rounding_kinds() -> list[Any]:
    """Return PyTorch's settings for the kinds of operations in which a CPU may round float32 inputs now."""
    kinds = [getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn")]
    return [kind for kind in kinds if getattr(kind, "fp32_precision", "none") not in ("none", "ieee")]
