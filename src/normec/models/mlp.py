"""A perceptron with one hidden layer."""

from __future__ import annotations

from torch import nn


class MLP(nn.Sequential):
    """A perceptron with one hidden layer and ReLU.

    Args:
        features: The number of inputs of a record.
        hidden: The number of hidden units.
        classes: The number of classes.

    Example:
        >>> import torch
        >>> MLP(features=4, hidden=8, classes=3)(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
