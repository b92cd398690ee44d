"""SCAFFOLD at client level: local steps with control variates, and one clipped message for both (DP-SCAFFOLD).

Clients whose data differ drift apart during their local steps. SCAFFOLD (Karimireddy et al. 2020) corrects every local
gradient by the difference between the control variates of the server, c, and of the client, c_i:

    client i:  y⁰ = x;  y^{j+1} = y^j − η (∇f_i(y^j) + c − c_i);   u_i = (x − y^K)/(K η)
               m_i = Clip_τ((u_i, u_i − c))                           both parts together have length τ at most
               c_i ← c_i + the second part of m_i                     where nothing is clipped: the mean gradient
    server:    (u, Δ) = (1/n) Σ m_i;   c ← c + Δ;   x ← x − γ u       so that c = mean c_i, always

With γ = K η the server takes the mean of the clients' models. The private SCAFFOLD of Noble et al. (2022, arXiv
2111.09278) protects records; here the whole client is protected, by the joint bound of its message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import positive
from ..sampling.random_streams import Key
from .method import Method, Tables
from .operators import Clip

CONTROL = "control"


@dataclass(frozen=True)
class Scaffold(Method):
    """Local steps with control variates. It needs `train(..., local=LocalSteps(...))`.

    Args:
        tau: The clipping threshold of a message: the update and the change of the control variate together.

    Raises:
        UsageError: `tau` is not positive and finite.

    Example:
        >>> import torch
        >>> from normec import LocalSteps, Problem, train
        >>> bowls = [lambda x, c=c: ((x - c) ** 2).sum() for c in (0.0, 4.0)]
        >>> problem = Problem.from_functions(bowls, torch.zeros(1))
        >>> run = train(problem, Scaffold(tau=100.0), lr=0.4, rounds=60, local=LocalSteps(steps=4, lr=0.1))
        >>> run.x.round(decimals=2), run.state.clients["control"].round(decimals=1).flatten()
        (tensor([2.]), tensor([ 4., -4.]))
    """

    name: ClassVar[str] = "scaffold"
    noise_path: ClassVar[str] = "noise also enters the control variate c, by which clients correct later updates"
    tau: float

    def __post_init__(self) -> None:
        positive(tau=self.tau)

    @property
    def bound(self) -> float:
        return self.tau

    def message_length(self, dimension: int) -> int:
        return 2 * dimension

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(x)}

    def local_correction(self, state: Tables, public: Tables) -> Tensor:
        """c − c_i."""
        return public[CONTROL] - state[CONTROL]

    def message(
        self, update: Tensor, state: Tables, key: Key | None = None, public: Tables | None = None
    ) -> tuple[Tensor, Tables]:
        """m_i = Clip_τ((u_i, u_i − c))."""
        if public is None:
            raise TypeError("message needs the server's control variate")
        return Clip(self.tau)(torch.cat([update, update - public[CONTROL]], dim=-1), key), state

    def commit(self, draft: Tables, sent: Tensor) -> Tables:
        """c_i ← c_i + the second part of the message."""
        return {CONTROL: draft[CONTROL] + sent.chunk(2, dim=-1)[1]}

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(x)}

    def broadcast(self, state: Tables) -> dict[str, Tensor]:
        return {CONTROL: state[CONTROL]}

    def server_step(self, mean_message: Tensor, state: Tables) -> tuple[Tensor, Tables]:
        """c ← c + Δ; the direction is u."""
        update, change = mean_message.chunk(2)
        return update, {CONTROL: state[CONTROL] + change}
