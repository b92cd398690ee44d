"""Error feedback around a client's momentum instead of its last gradient.

A client averages its gradients over the rounds, which takes out most of the noise of small batches, and sends the
difference between this average v_i and its memory g_i. With p = ``client_momentum``:

    client i:  v_i ← p v_i + (1−p) ∇f_i(x; ξ_i)
               m_i = Ψ(v_i − g_i)
               g_i ← (1−λ) g_i + β m_i
    server:    ĝ ← (1−λ) ĝ + (β/n) Σ m_i;   x ← x − γ ĝ   or   x − γ ĝ/‖ĝ‖

p = 0 is the method without momentum. A client that does not take part keeps v_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import below_one
from ..sampling.random_streams import Key
from .error_feedback import ErrorFeedbackScheme, compressor_of
from .method import MEMORY
from .operators import Clip, Operator, SmoothedNorm

MOMENTUM = "momentum"


class MomentumScheme(ErrorFeedbackScheme):
    """The formulas above. Subclasses define Ψ and choose their settings.

    `lipschitz` is None: the rules for records know of no state beside the memory.
    """

    client_momentum: float
    lipschitz: float | None = None
    initial_memory_sets = (MEMORY, MOMENTUM)

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(client_momentum=self.client_momentum)

    def client_init(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {MOMENTUM: torch.zeros_like(x), MEMORY: torch.zeros_like(x)}

    def message(  # type: ignore[override]
        self, update: Tensor, state: dict[str, Tensor], key: Key | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """v_i ← p v_i + (1−p) ∇f_i;  m_i = Ψ(v_i − g_i)."""
        average = self.client_momentum * state[MOMENTUM] + (1 - self.client_momentum) * update
        return self.operator(average - state[MEMORY], key), {MOMENTUM: average, MEMORY: state[MEMORY]}

    def commit(self, draft: dict[str, Tensor], sent: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """g_i ← (1−λ) g_i + β m_i."""
        return {MOMENTUM: draft[MOMENTUM], MEMORY: super().commit(draft[MEMORY], sent)}

    def absent(self, state: dict[str, Tensor], rounds: int = 1) -> dict[str, Tensor]:  # type: ignore[override]
        """g_i ← (1−λ) g_i."""
        return {MOMENTUM: state[MOMENTUM], MEMORY: super().absent(state[MEMORY], rounds)}

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:
        """Return the memory after a message.

        It depends on messages alone, as without momentum. The statement is repeated here because a subclass that
        overrides `message` does not inherit it.
        """
        return super().follow(memory, sent)


@dataclass(frozen=True)
class MomentumNormEC(MomentumScheme):
    """α-NormEC with client momentum: Ψ = Norm_α.

    Args:
        alpha: Smoothing of the normalisation, v/(α + ‖v‖).
        beta: The step size of the memories along the messages.
        client_momentum: The share of the old average that a client keeps, p.
        server_norm: Whether the server normalises its step.
        decay: The share of the memories that is forgotten in each round, λ.

    Raises:
        UsageError: `alpha` is negative, `beta` is not positive, or `client_momentum` or `decay` does not lie in [0, 1).

    Example:
        >>> import torch
        >>> method = MomentumNormEC(alpha=0.0, beta=0.5, client_momentum=0.5)
        >>> message, state = method.client_step(torch.tensor([3.0, 4.0]), method.client_init(torch.zeros(2)))
        >>> message, state["momentum"]
        (tensor([0.6000, 0.8000]), tensor([1.5000, 2.0000]))
    """

    name: ClassVar[str] = "normec-momentum"
    alpha: float
    beta: float
    client_momentum: float = 0.9
    server_norm: bool = True
    decay: float = 0.0

    @cached_property
    def operator(self) -> Operator:  # type: ignore[override]
        return SmoothedNorm(self.alpha)


@dataclass(frozen=True)
class Clip21SGD2M(MomentumScheme):
    """Clip21-SGD2M (Islamov et al. 2025, arXiv 2502.11682): Ψ = Clip_τ.

    With p = 1 − b₁ and β = b₂ in the paper's symbols.

    Args:
        tau: The clipping threshold.
        beta: The step size of the memories along the messages.
        client_momentum: The share of the old average that a client keeps, p.
        decay: The share of the memories that is forgotten in each round, λ; 0 in the paper.

    Raises:
        UsageError: `tau` or `beta` is not positive, or `client_momentum` or `decay` does not lie in [0, 1).

    Example:
        >>> Clip21SGD2M(tau=0.5).bound
        0.5
    """

    name: ClassVar[str] = "clip21-sgd2m"
    tau: float
    beta: float = 1.0
    client_momentum: float = 0.9
    decay: float = 0.0
    server_norm: ClassVar[bool] = False  # type: ignore[misc]

    @cached_property
    def operator(self) -> Operator:  # type: ignore[override]
        return Clip(self.tau)


@dataclass(frozen=True)
class EF21SGDM(MomentumScheme):
    """EF21-SGDM (Fatkhullin et al. 2023); with `server_norm`, ‖EF21-SGDM‖ (Khirirat et al. 2024, arXiv 2410.16871).

    Args:
        compressor: A contractive operator: `TopK`, `RandK`, or one of your own.
        client_momentum: The share of the old average that a client keeps, p.
        server_norm: Whether the server normalises its step.

    Raises:
        UsageError: `compressor` is not an operator, or `client_momentum` does not lie in [0, 1).

    Example:
        >>> import torch
        >>> from normec import TopK
        >>> method = EF21SGDM(TopK(1), client_momentum=0.0)
        >>> method.client_step(torch.tensor([3.0, -4.0]), method.client_init(torch.zeros(2)))[0]
        tensor([ 0., -4.])
    """

    name: ClassVar[str] = "ef21-sgdm"
    compressor: Operator
    client_momentum: float = 0.9
    server_norm: bool = False
    beta: ClassVar[float] = 1.0  # type: ignore[misc]
    decay: ClassVar[float] = 0.0  # type: ignore[misc]

    @property
    def operator(self) -> Operator:  # type: ignore[override]
        return self.compressor


def ef21_sgdm(compressor: str, k: int | None = None, sizes: Sequence[int] = (), **settings: Any) -> EF21SGDM:
    """EF21-SGDM by the names of configuration files."""
    return EF21SGDM(compressor_of(compressor, k, sizes), **settings)
