"""Linear models that start at zero, and the usual non-convex regulariser for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import non_negative


class Softmax(nn.Linear):
    """Softmax regression: one logit per class; inputs of any shape are flattened.

    Args:
        features: The number of inputs of a record.
        classes: The number of classes.

    Example:
        >>> import torch
        >>> Softmax(features=4, classes=3)(torch.zeros(5, 2, 2)).shape
        torch.Size([5, 3])
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class Logistic(nn.Linear):
    """Logistic regression without intercept, as in the EF21 papers: one logit per record.

    Args:
        features: The number of inputs of a record.

    Example:
        >>> import torch
        >>> Logistic(features=4)(torch.zeros(5, 4)).shape
        torch.Size([5])
    """

    def __init__(self, features: int) -> None:
        super().__init__(features, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))[:, 0]


@dataclass(frozen=True)
class NonconvexPenalty:
    """x ↦ λ Σ x_j²/(1 + x_j²): smooth with constant 2λ, bounded by λd, not convex.

    Args:
        weight: λ.

    Raises:
        UsageError: The weight is negative or not finite.

    Example:
        >>> import torch
        >>> float(NonconvexPenalty(0.5)(torch.ones(4)))
        1.0
    """

    weight: float

    def __post_init__(self) -> None:
        non_negative(penalty=self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        squares = x * x
        return self.weight * (squares / (1 + squares)).sum()

    def with_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the penalties and their gradients at one point ``[d]`` or at several ``[c, d]``, without autograd."""
        squares = x * x
        inverses = (squares + 1).reciprocal_()
        values = squares.mul_(inverses).sum(-1).mul_(self.weight)
        return values, inverses.square_().mul_(x).mul_(2 * self.weight)
