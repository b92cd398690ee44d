"""The methods as optimizers, by name: what `normec.NormEC` and its like are for the round loop.

Each takes, beside its method's settings, what `ClientOptimizer` takes: `clients`, `privacy`, `rounds`, `ledger` and
`seed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..algorithms import methods
from ..algorithms.operators import Operator
from .optimizer import ClientOptimizer


def NormEC(  # noqa: N802
    params: Iterable[Any],
    lr: float,
    alpha: float,
    beta: float,
    server_norm: bool = True,
    decay: float = 0.0,
    **how: Any,
) -> ClientOptimizer:
    """α-NormEC, Algorithm 1."""
    return ClientOptimizer(params, methods.NormEC(alpha, beta, server_norm, decay), lr, **how)


def Clip21(params: Iterable[Any], lr: float, tau: float, decay: float = 0.0, **how: Any) -> ClientOptimizer:  # noqa: N802
    """Error feedback around clipping."""
    return ClientOptimizer(params, methods.Clip21(tau, decay), lr, **how)


def EF21(params: Iterable[Any], lr: float, compressor: Operator, **how: Any) -> ClientOptimizer:  # noqa: N802
    """Error feedback around a compressor."""
    return ClientOptimizer(params, methods.EF21(compressor), lr, **how)


def DPSGD(  # noqa: N802
    params: Iterable[Any],
    lr: float,
    operator: Operator,
    beta: float = 1.0,
    momentum: float = 0.0,
    **how: Any,
) -> ClientOptimizer:
    """Direct normalisation or clipping, without error feedback."""
    return ClientOptimizer(params, methods.DPSGD(operator, beta, momentum), lr, **how)


def GD(params: Iterable[Any], lr: float, **how: Any) -> ClientOptimizer:  # noqa: N802
    """The mean gradient: SGD under DDP, for comparison."""
    return ClientOptimizer(params, methods.GD(), lr, **how)
