"""DP-AdamBC: Adam whose second moment is corrected for the noise in the direction.

Privacy noise adds its variance to Adam's second moment. Where the noise outweighs the signal, every coordinate is then
divided by about the same number, and Adam becomes SGD with momentum. DP-AdamBC subtracts the variance, which the server
knows (Tang, Shpilevskiy and Lécuyer 2023, arXiv 2312.14334):

    m ← β₁ m + (1−β₁) g,   v ← β₂ v + (1−β₂) g²,   φ ← β₂ φ + (1−β₂) s²
    x ← x − lr · m̂ / √max(v̂ − φ̂, floor)

with m̂ = m/(1−β₁ᵗ), and v̂ and φ̂ likewise with β₂. s² is the variance of the noise in a coordinate of the direction g of
this round. It is the same in every round in the paper, so that φ̂ = s²; here it may change from round to round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UsageError, below_one, non_negative, positive


class AdamBC(Optimizer):
    """DP-AdamBC as a torch optimizer. A training loop sets `noise_variance` of its group before every step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        noise_variance: float = 0.0,
    ) -> None:
        """`floor`: the smallest value that the corrected second moment may take."""
        non_negative(lr=lr, noise_variance=noise_variance)
        positive(floor=floor)
        for beta in betas:
            below_one(betas=beta)
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "noise_variance": noise_variance})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step with the present gradients."""
        if closure is not None:
            raise UsageError("AdamBC takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["noise"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        state["step"] += 1
        state["noise"].mul_(second).add_((1 - second) * group["noise_variance"])
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        steps = float(state["step"])
        first_sum, second_sum = 1 - math.pow(first, steps), 1 - math.pow(second, steps)
        corrected = (square / second_sum - float(state["noise"]) / second_sum).clamp_(min=group["floor"])
        parameter.addcdiv_(average, corrected.sqrt_(), value=-group["lr"] / first_sum)
