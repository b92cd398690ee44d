"""The built-in methods as `torch.optim` optimizers.

Each takes, beside its method's settings, what `ClientOptimizer` takes: `clients`, `weights`, `privacy`, `rounds`,
`ledger`, `witness`, `seed` and `server_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..algorithms import direct, error_feedback
from ..algorithms.operators import Operator
from .optimizer import ClientOptimizer


class NormEC(ClientOptimizer):
    """α-NormEC, Algorithm 1, as an optimizer.

    Args:
        params: Parameters or parameter groups.
        lr: The step size.
        alpha: α of the smoothed normalisation.
        beta: β, the step of the memories.
        server_norm: Whether the server normalises its step.
        decay: The forgetting λ of the memories.
        how: The other arguments of `ClientOptimizer`: `clients`, `weights`, `privacy`, `rounds`, `ledger`, `witness`,
            `seed` and `server_optimizer`.

    Raises:
        UsageError: A value is out of range, or the ranks do not agree.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = NormEC([parameter], lr=0.1, alpha=0.01, beta=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([-0.0707, -0.0707])
    """

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
    """Error feedback around clipping, as an optimizer.

    Args:
        params: Parameters or parameter groups.
        lr: The step size.
        tau: The clipping threshold τ.
        decay: The forgetting λ of the memories.
        how: The other arguments of `ClientOptimizer`: `clients`, `weights`, `privacy`, `rounds`, `ledger`, `witness`,
            `seed` and `server_optimizer`.

    Raises:
        UsageError: A value is out of range, or the ranks do not agree.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Clip21([parameter], lr=0.1, tau=1.0)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([-0.0707, -0.0707])
    """

    def __init__(self, params: Iterable[Any], lr: float, tau: float, decay: float = 0.0, **how: Any) -> None:
        super().__init__(params, error_feedback.Clip21(tau, decay), lr, **how)


class EF21(ClientOptimizer):
    """Error feedback around a compressor, as an optimizer.

    Args:
        params: Parameters or parameter groups.
        lr: The step size.
        compressor: The compressor, such as `normec.TopK`.
        how: The other arguments of `ClientOptimizer`: `clients`, `weights`, `privacy`, `rounds`, `ledger`, `witness`,
            `seed` and `server_optimizer`.

    Raises:
        UsageError: A value is out of range, or the ranks do not agree.

    Example:
        >>> import torch
        >>> from normec import TopK
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = EF21([parameter], lr=0.1, compressor=TopK(1))
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([-0.1000,  0.0000])
    """

    def __init__(self, params: Iterable[Any], lr: float, compressor: Operator, **how: Any) -> None:
        super().__init__(params, error_feedback.EF21(compressor), lr, **how)


class DPSGD(ClientOptimizer):
    """Direct normalisation or clipping, without error feedback, as an optimizer.

    Args:
        params: Parameters or parameter groups.
        lr: The step size.
        operator: The operator, such as `normec.Clip`.
        beta: The factor of the sum.
        momentum: The momentum of the server.
        how: The other arguments of `ClientOptimizer`: `clients`, `weights`, `privacy`, `rounds`, `ledger`, `witness`,
            `seed` and `server_optimizer`.

    Raises:
        UsageError: A value is out of range, or the ranks do not agree.

    Example:
        >>> import torch
        >>> from normec import Clip
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = DPSGD([parameter], lr=0.1, operator=Clip(1.0))
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([-0.0707, -0.0707])
    """

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
    """The mean gradient, as an optimizer: SGD under DDP, for comparison.

    Args:
        params: Parameters or parameter groups.
        lr: The step size.
        how: The other arguments of `ClientOptimizer`: `clients`, `weights`, `privacy`, `rounds`, `ledger`, `witness`,
            `seed` and `server_optimizer`.

    Raises:
        UsageError: A value is out of range, or the ranks do not agree.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = GD([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([-0.1000, -0.1000])
    """

    def __init__(self, params: Iterable[Any], lr: float, **how: Any) -> None:
        super().__init__(params, direct.GD(), lr, **how)
