"""The built-in methods as `torch.optim` optimizers.

Each takes the settings of its method and the keyword arguments of `ClientOptimizer`: `clients`, `privacy`, `rounds`,
`ledger` and `seed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..algorithms import direct, error_feedback
from ..algorithms.operators import Operator
from .optimizer import ClientOptimizer


class NormEC(ClientOptimizer):
    """α-NormEC, Algorithm 1."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        alpha: float,
        beta: float,
        server_norm: bool = True,
        decay: float = 0.0,
        **how: Any,
    ) -> None:
        super().__init__(params, error_feedback.NormEC(alpha, beta, server_norm, decay), lr, **how)


class Clip21(ClientOptimizer):
    """Error feedback around clipping."""

    def __init__(self, params: Iterable[Any], lr: float, tau: float, decay: float = 0.0, **how: Any) -> None:
        super().__init__(params, error_feedback.Clip21(tau, decay), lr, **how)


class EF21(ClientOptimizer):
    """Error feedback around a compressor."""

    def __init__(self, params: Iterable[Any], lr: float, compressor: Operator, **how: Any) -> None:
        super().__init__(params, error_feedback.EF21(compressor), lr, **how)


class DPSGD(ClientOptimizer):
    """Direct normalisation or clipping, without error feedback."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        operator: Operator,
        beta: float = 1.0,
        momentum: float = 0.0,
        **how: Any,
    ) -> None:
        super().__init__(params, direct.DPSGD(operator, beta, momentum), lr, **how)


class GD(ClientOptimizer):
    """The mean gradient: SGD under DDP, for comparison."""

    def __init__(self, params: Iterable[Any], lr: float, **how: Any) -> None:
        super().__init__(params, direct.GD(), lr, **how)
