"""Methods whose clients send a function of their gradient and keep no memory: DP-SGD and gradient descent.

    client i:  m_i = Ψ(∇f_i(x))
    server:    ĝ ← p ĝ + (β/n) Σ m_i,   x ← x − γ ĝ

with ``momentum`` p at the server (0 in the paper's eq. (2)). Momentum is PyTorch's: a step of γ goes on as γp, γp², …,
γ/(1−p) in all. It acts on what was released, so it costs no privacy. The server optimizer "momentum" takes the same
steps, for every method; here the momentum is part of the method, of its name and of its seeded noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import below_one, positive
from ..sampling.random_streams import Key
from .method import OperatorMethod, ScaledDifference, State
from .operators import (
    Clip,
    Identity,
    Operator,
    SmoothedNorm,
    check_operator,
    defined_by_scale,
    proven_lipschitz,
    supports_cuda_graphs,
)


class DirectScheme(OperatorMethod):
    """The formulas above. Subclasses define Ψ and choose their settings."""

    beta: float
    momentum: float
    linear_server = True

    def __post_init__(self) -> None:
        check_operator(self.operator)
        positive(beta=self.beta)
        below_one(momentum=self.momentum)

    @property
    def lipschitz(self) -> float | None:  # type: ignore[override]
        return proven_lipschitz(self.operator)

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return supports_cuda_graphs(self.operator)

    @property
    def noise_response(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.momentum, self.beta

    def message(self, update: Tensor, state: State, key: Key | None = None) -> tuple[Tensor, State]:
        """m_i = Ψ(∇f_i(x))."""
        return self.operator(update, key), state

    def server_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """((1/n) Σ m_i, ĝ) → (direction, new ĝ); the two are equal."""
        step = self.beta * mean_message
        estimate = self.momentum * state + step if self.momentum else step
        return estimate, estimate

    def fused(self) -> ScaledDifference | None:
        if not defined_by_scale(self.operator):
            return None
        return ScaledDifference(self.operator.scale, memory=False)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DPSGD(DirectScheme):
    """Direct normalisation or clipping, eq. (2): x ← x − γ (β/n) Σ Ψ(∇f_i(x)); the bias stays.

    Args:
        operator: `SmoothedNorm` or `Clip`.
        beta: A factor of the step.
        momentum: The momentum of the server's step.

    Raises:
        UsageError: `operator` is not an operator, `beta` is not positive, or `momentum` does not lie in [0, 1).

    Example:
        >>> import torch
        >>> from normec import Clip
        >>> method = DPSGD(Clip(1.0), momentum=0.5)
        >>> direction, estimate = method.server_step(torch.tensor([1.0]), torch.tensor([2.0]))
        >>> direction
        tensor([2.])
    """

    name: ClassVar[str] = "dpsgd"
    operator: Operator
    beta: float = 1.0
    momentum: float = 0.0


def dpsgd_norm(alpha: float, beta: float = 1.0, momentum: float = 0.0) -> DPSGD:
    """DP-SGD with smoothed normalisation, by the names of configuration files."""
    return DPSGD(SmoothedNorm(alpha), beta, momentum)


def dpsgd_clip(tau: float, beta: float = 1.0, momentum: float = 0.0) -> DPSGD:
    """DP-SGD with clipping, by the names of configuration files."""
    return DPSGD(Clip(tau), beta, momentum)


@dataclass(frozen=True)
class GD(DirectScheme):
    """Distributed gradient descent: the exact mean gradient, without privacy.

    Example:
        >>> GD().bound
        inf
    """

    name: ClassVar[str] = "gd"
    beta: ClassVar[float] = 1.0  # type: ignore[misc]
    momentum: ClassVar[float] = 0.0  # type: ignore[misc]

    @property
    def operator(self) -> Operator:  # type: ignore[override]
        return Identity()
