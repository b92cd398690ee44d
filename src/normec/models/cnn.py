"""A small convolutional network without normalisation layers, so that nothing but x depends on the data."""

from __future__ import annotations

from torch import nn


class SmallCNN(nn.Sequential):
    """Two 3×3 convolutions with pooling, then two linear layers; 28×28 grey images: 56,714 parameters."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, _, _ = shape
        super().__init__(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(5),
            nn.Flatten(),
            nn.Linear(32 * 25, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )
