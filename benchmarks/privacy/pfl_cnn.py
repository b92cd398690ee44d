"""The network of pfl-research's CIFAR-10 benchmark (`simple_cnn`), without its two dropout layers.

Dropout draws random numbers client by client, which takes many times as long when clients are computed together.
"""

from __future__ import annotations

from torch import nn


def simple_cnn() -> nn.Module:
    """Two convolutions and two linear layers for colour images of 32 × 32 pixels, 1,626,442 parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model
