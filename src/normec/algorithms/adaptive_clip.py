"""Clipping with a threshold that follows a quantile of the lengths that are clipped (Andrew et al. 2021).

The threshold C is public. A client clips at C, and sends one more number, which says whether it was short enough. Both
are scaled so that a message has length 1 at most, whatever C is; with w = ``bit_weight``:

    client i:  v_i            what the clipping method would clip: the update, or its difference to the memory
               s_i = 1 if ‖v_i‖ ≤ C, else −1
               m_i = (√(1−w²) Clip_C(v_i) / C,  w s_i)
    server:    Σ (m_i + z_i) / n = (μ, b);   μ ← C μ / √(1−w²)   the mean message of the clipping method
               share = (1 + b / (w p)) / 2   an estimate of the share of clients that were short enough
               C ← C exp(−η (share − q))     with the share held between −1 and 2, for noise may carry it anywhere

C stays between the smallest length that the model's precision measures reliably and its inverse: where all updates
vanish, or outgrow every threshold, it would otherwise end at 0 or at infinity.

p is the share of the clients that take part in a round (``participation``); those that do not send zero.

Privacy: (‖Clip_C(v)‖/C)² (1−w²) + w² ≤ 1, so the bound is 1 and the noise that is drawn for it covers the additional
number too: one release, one Gaussian of d + 1 coordinates. Compared with a fixed threshold, the noise of the update
grows by 1/√(1−w²), which is 2 % for w = 0.2. This is the joint mechanism of the paper with
z_Δ = z/√(1−w²) and σ_b = z/(2w), since z⁻² = z_Δ⁻² + (2σ_b)⁻².
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import UsageError, fraction, open_unit, positive
from ..sampling.random_streams import Key
from .client_momentum import Clip21SGD2M
from .direct import DPSGD
from .error_feedback import Clip21
from .method import ESTIMATE, MEMORY, Method, OperatorMethod, State, Tables
from .operators import Clip, Identity, norms, smallest_reliable_norm
from .scaffold import Scaffold

THRESHOLD = "threshold"
BOUND = 1.0


@dataclass(frozen=True)
class AdaptiveClip(Method):
    """A clipping method whose threshold tunes itself; its own threshold is the first one.

    Args:
        method: The clipping method: `DPSGD(Clip(τ))`, `Clip21(τ)`, `Clip21SGD2M(τ)`, or another method whose operator
            is `Clip`.
        quantile: The share q of the lengths that should lie below the threshold.
        threshold_lr: The step size η of the threshold's logarithm.
        bit_weight: The weight w of the additional number, between 0 and 1.
        participation: The share p of the clients that take part in a round.

    Raises:
        UsageError: The method does not clip, its clipping cannot be replaced, or a number is out of range.

    Example:
        >>> import torch
        >>> from normec import DPSGD, Clip
        >>> method = AdaptiveClip(DPSGD(Clip(5.0)), bit_weight=0.6)
        >>> state = method.server_init(torch.zeros(2))
        >>> public = method.broadcast(state)
        >>> message, _ = method.message(torch.tensor([[3.0, 4.0]]), method.client_init(torch.zeros(2)), None, public)
        >>> message
        tensor([[0.4800, 0.6400, 0.6000]])
        >>> direction, state = method.server_step(message[0], state)
        >>> direction.round(decimals=3), float(state["threshold"]) < 5  # all lengths lie below: the threshold sinks
        (tensor([3., 4.]), True)
    """

    name: ClassVar[str] = "adaptive-clip"
    noise_path: ClassVar[str] = "its noise is multiplied by the threshold, which depends on the noise of earlier rounds"
    method: Method
    quantile: float = 0.5
    threshold_lr: float = 0.2
    bit_weight: float = 0.2
    participation: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.method, Scaffold):
            raise UsageError(
                "AdaptiveClip replaces the operator of a method, and scaffold has none: it clips an update and the "
                "change of a control variate together, by one threshold that is given; use Scaffold(τ) alone, or "
                "AdaptiveClip(DPSGD(Clip(τ))) with local steps"
            )
        known = type(self.method).__module__.startswith(f"{__package__}.")
        if not (known and isinstance(self.method, OperatorMethod) and type(self.method.operator) is Clip):
            raise UsageError(
                "AdaptiveClip is for normec's methods whose operator is Clip: DPSGD(Clip(τ)), also with local steps, "
                f"Clip21(τ) and Clip21SGD2M(τ), got {self.method!r}; use one of them, or a threshold that is given"
            )
        if type(self._unclipped.operator) is not Identity:  # type: ignore[attr-defined]
            raise UsageError(
                f"AdaptiveClip cannot replace the clipping of {self.method.name}, which computes its operator anew; "
                "use Clip21 or Clip21SGD2M"
            )
        positive(threshold_lr=self.threshold_lr)
        open_unit(quantile=self.quantile, bit_weight=self.bit_weight)
        fraction(participation=self.participation)

    @property
    def bound(self) -> float:
        return BOUND

    @property
    def initial_memory_sets(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.method.initial_memory_sets

    @cached_property
    def _unclipped(self) -> Method:
        """The method with the identity in place of the clipping: its messages are what is to be clipped."""
        opened = copy.copy(self.method)
        opened.__dict__["operator"] = Identity()
        return opened

    @property
    def _scale(self) -> float:
        return math.sqrt(1 - self.bit_weight**2)

    def message_length(self, dimension: int) -> int:
        return dimension + 1

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        """Return the method's own state, and the threshold of the client's last message."""
        return {**_named(self.method.client_init(x), MEMORY), THRESHOLD: x.new_zeros(())}

    def message(
        self, update: Tensor, state: Tables, key: Key | None = None, public: Tables | None = None
    ) -> tuple[Tensor, Tables]:
        """m_i = (√(1−w²) Clip_C(v_i)/C, ±w)."""
        if public is None:
            raise TypeError("message needs the public threshold")
        threshold = public[THRESHOLD].to(update)
        v, draft = self._unclipped.message(update, self._inner(state), key)
        lengths = norms(v) / threshold
        short = (lengths <= 1).to(update) * 2 - 1
        clipped = v / threshold / lengths.clamp(min=1)
        message = torch.cat([self._scale * clipped, self.bit_weight * short], dim=-1)
        return message, {**_named(draft, MEMORY), THRESHOLD: threshold.expand(len(update)).clone()}

    def commit(self, draft: Tables, sent: Tensor) -> Tables:
        """Commit the method's own state, with the message in the method's own scale."""
        own = draft[THRESHOLD][:, None] / self._scale * sent[:, :-1]
        return {**_named(self.method.commit(self._inner(draft), own), MEMORY), THRESHOLD: draft[THRESHOLD]}

    def absent(self, state: Tables, rounds: int = 1) -> Tables:
        return {**_named(self.method.absent(self._inner(state), rounds), MEMORY), THRESHOLD: state[THRESHOLD]}

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        first = x.new_tensor(self.method.operator.tau)  # type: ignore[attr-defined]
        return {**_named(self.method.server_init(x), ESTIMATE), THRESHOLD: first}

    def broadcast(self, state: Tables) -> dict[str, Tensor]:
        return {THRESHOLD: state[THRESHOLD]}

    def server_step(self, mean_message: Tensor, state: Tables) -> tuple[Tensor, Tables]:
        """C ← C exp(−η (share − q)), after the method's own step."""
        threshold = state[THRESHOLD]
        mean, bit = threshold / self._scale * mean_message[:-1], mean_message[-1]
        direction, kept = self.method.server_step(mean, self._inner(state, ESTIMATE))
        share = (1 + bit / (self.bit_weight * self.participation)) / 2
        moved = threshold * torch.exp(-self.threshold_lr * (share.clamp(-1, 2) - self.quantile))
        least = smallest_reliable_norm(threshold.dtype)
        moved = moved.clamp(least, 1 / least)
        return direction, {**_named(kept, ESTIMATE), THRESHOLD: moved}

    def _inner(self, state: Tables, single: str = MEMORY) -> State:
        """The method's own part of the state, in the form that it uses."""
        own = {name: value for name, value in state.items() if name != THRESHOLD}
        plain = isinstance(
            (self.method.client_init if single == MEMORY else self.method.server_init)(torch.zeros(1)), Tensor
        )
        return own[single] if plain else own


def _named(state: State, single: str) -> dict[str, Tensor]:
    return {single: state} if isinstance(state, Tensor) else dict(state)


def dpsgd_adaptive(
    tau: float, beta: float, momentum: float, participation: float = 1.0, **settings: Any
) -> AdaptiveClip:
    """DP-SGD with adaptive clipping, by the names of configuration files."""
    return AdaptiveClip(DPSGD(Clip(tau), beta, momentum), participation=participation, **settings)


def clip21_adaptive(tau: float, decay: float, participation: float = 1.0, **settings: Any) -> AdaptiveClip:
    """Clip21 with adaptive clipping, by the names of configuration files."""
    return AdaptiveClip(Clip21(tau, decay), participation=participation, **settings)


def clip21_sgd2m_adaptive(
    tau: float, beta: float, client_momentum: float, decay: float, participation: float = 1.0, **settings: Any
) -> AdaptiveClip:
    """Clip21-SGD2M with adaptive clipping, by the names of configuration files."""
    return AdaptiveClip(Clip21SGD2M(tau, beta, client_momentum, decay), participation=participation, **settings)
