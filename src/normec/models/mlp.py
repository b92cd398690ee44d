"""A perceptron with one hidden layer."""

from __future__ import annotations

from torch import nn


class MLP(nn.Sequential):
    """features → hidden → classes, ReLU between."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
