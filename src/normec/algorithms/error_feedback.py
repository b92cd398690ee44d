"""Algorithm 1 of the paper and its relatives with error feedback.

Client i has a memory g_i, the server has an estimate ĝ, and λ is the forgetting rate (``decay``; 0 in the paper):

    client i:  m_i = Ψ(∇f_i(x) − g_i)            the message, without β
               g_i ← (1−λ) g_i + β m_i           the memory
    server:    ĝ ← (1−λ) ĝ + (β/n) Σ m_i         so that always ĝ = mean g_i
               x ← x − γ ĝ   or   x − γ ĝ/‖ĝ‖    (server normalisation; 0/0 = 0)

Clients that do not take part forget like the others, so that ĝ stays the mean. The noise of a private client is added
to the message when it is sent, outside this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import below_one, one_of, positive
from ..sampling.random_streams import Key
from .method import OperatorMethod, ScaledDifference
from .operators import (
    Clip,
    Operator,
    RandK,
    SmoothedNorm,
    TopK,
    check_operator,
    defined_by_scale,
    normalise,
    proven_lipschitz,
    supports_cuda_graphs,
)


class ErrorFeedbackScheme(OperatorMethod):
    """The formulas above. Subclasses define Ψ and choose their settings."""

    beta: float
    server_norm: bool
    decay: float

    def __post_init__(self) -> None:
        check_operator(self.operator)  # creating it checks its settings, such as alpha
        positive(beta=self.beta)
        below_one(decay=self.decay)

    @property
    def lipschitz(self) -> float | None:  # type: ignore[override]
        return proven_lipschitz(self.operator)

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return supports_cuda_graphs(self.operator)

    @property
    def noise_response(self) -> tuple[float, float] | None:  # type: ignore[override]
        return None if self.server_norm else (1 - self.decay, self.beta)

    @property
    def linear_server(self) -> bool:  # type: ignore[override]
        return not self.server_norm

    def client_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def message(self, update: Tensor, state: Tensor, key: Key | None = None) -> tuple[Tensor, Tensor]:
        """m_i = Ψ(∇f_i(x) − g_i)."""
        return self.operator(update - state, key), state

    def commit(self, draft: Tensor, sent: Tensor) -> Tensor:
        """g_i ← (1−λ) g_i + β m_i."""
        return self._forgotten(draft) + self.beta * sent

    def absent(self, state: Tensor, rounds: int = 1) -> Tensor:
        """g_i ← (1−λ) g_i: all clients forget alike."""
        return self._forgotten(state, rounds)

    def _forgotten(self, values: Tensor, rounds: int = 1) -> Tensor:
        return (1 - self.decay) ** rounds * values if self.decay else values

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:
        """Return the memory after a message; it depends on messages alone."""
        return self._forgotten(memory) + self.beta * sent

    def sent_between(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the message that moves a memory from one value to the other."""
        return (after - self._forgotten(before)) / self.beta

    def server_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """((1/n) Σ m_i, ĝ) → (direction, new ĝ)."""
        estimate = self._forgotten(state) + self.beta * mean_message
        return (normalise(estimate) if self.server_norm else estimate), estimate

    def fused(self) -> ScaledDifference | None:
        if not defined_by_scale(self.operator):
            return None
        return ScaledDifference(self.operator.scale, True, self.beta, 1 - self.decay)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormEC(ErrorFeedbackScheme):
    """α-NormEC, Algorithm 1: Ψ = Norm_α. ``server_norm=False`` is the paper's ablation "without SN".

    Args:
        alpha: Smoothing of the normalisation, v/(α + ‖v‖); the default is the paper's usual value.
        beta: The step size of the memories along the messages; the default is the paper's best value.
        server_norm: Whether the server normalises its step.
        decay: The share of the memories that is forgotten in each round, λ; 0 in the paper.

    Raises:
        UsageError: `alpha` is negative, `beta` is not positive, or `decay` does not lie in [0, 1).

    Example:
        >>> import torch
        >>> method = NormEC(alpha=0.0, beta=0.5)
        >>> message, memory = method.client_step(torch.tensor([3.0, 4.0]), torch.zeros(2))
        >>> message, memory
        (tensor([0.6000, 0.8000]), tensor([0.3000, 0.4000]))
        >>> direction, estimate = method.server_step(message, torch.zeros(2))
    """

    name: ClassVar[str] = "normec"
    alpha: float = 0.01
    beta: float = 0.1
    server_norm: bool = True
    decay: float = 0.0

    @cached_property
    def operator(self) -> Operator:  # type: ignore[override]
        return SmoothedNorm(self.alpha)


@dataclass(frozen=True)
class Clip21(ErrorFeedbackScheme):
    """Error feedback around clipping, Ψ = Clip_τ, β = 1 (Khirirat et al. 2023).

    Args:
        tau: The clipping threshold.
        decay: The share of the memories that is forgotten in each round.

    Raises:
        UsageError: `tau` is not positive, or `decay` does not lie in [0, 1).

    Example:
        >>> import torch
        >>> message, memory = Clip21(tau=1.0).client_step(torch.tensor([3.0, 4.0]), torch.zeros(2))
        >>> memory
        tensor([0.6000, 0.8000])
    """

    name: ClassVar[str] = "clip21"
    tau: float
    decay: float = 0.0
    beta: ClassVar[float] = 1.0  # type: ignore[misc]
    server_norm: ClassVar[bool] = False  # type: ignore[misc]

    @cached_property
    def operator(self) -> Operator:  # type: ignore[override]
        return Clip(self.tau)


@dataclass(frozen=True)
class ErrorFeedback(ErrorFeedbackScheme):
    """Error feedback around any operator Ψ, for combinations that have no name of their own.

    Args:
        operator: Ψ, which maps a client's difference to its message.
        beta: The step size of the memories along the messages.
        server_norm: Whether the server normalises its step.
        decay: The share of the memories that is forgotten in each round.

    Raises:
        UsageError: `operator` is not an operator, `beta` is not positive, or `decay` does not lie in [0, 1).

    Example:
        >>> from normec import Clip
        >>> ErrorFeedback(Clip(0.5), beta=0.3).bound
        0.5
    """

    name: ClassVar[str] = "error-feedback"
    operator: Operator
    beta: float = 1.0
    server_norm: bool = False
    decay: float = 0.0


@dataclass(frozen=True)
class EF21(ErrorFeedbackScheme):
    """Error feedback around a contractive compressor, β = 1 (Richtárik et al. 2021).

    Args:
        compressor: `TopK`, `RandK`, or your own operator.

    Raises:
        UsageError: `compressor` is not an operator.

    Example:
        >>> import torch
        >>> from normec import TopK
        >>> message, memory = EF21(TopK(1)).client_step(torch.tensor([3.0, -4.0]), torch.zeros(2))
        >>> message
        tensor([ 0., -4.])
    """

    name: ClassVar[str] = "ef21"
    compressor: Operator
    beta: ClassVar[float] = 1.0  # type: ignore[misc]
    server_norm: ClassVar[bool] = False  # type: ignore[misc]
    decay: ClassVar[float] = 0.0  # type: ignore[misc]

    @property
    def operator(self) -> Operator:  # type: ignore[override]
        return self.compressor


def ef21(compressor: str, k: int | None = None, sizes: Sequence[int] = ()) -> EF21:
    """EF21 by the names of configuration files."""
    return EF21(compressor_of(compressor, k, sizes))


def compressor_of(name: str, k: int | None, sizes: Sequence[int]) -> Operator:
    """Return the compressor "topk" or "randk" that keeps k coordinates (default: a tenth of the parameters)."""
    one_of(("topk", "randk"), compressor=name)
    return (TopK if name == "topk" else RandK)(usual_kept(sum(sizes)) if k is None else k)


def usual_kept(dimension: int) -> int:
    """Return how many coordinates a compressor keeps if nothing else is given."""
    return max(1, dimension // 10)
