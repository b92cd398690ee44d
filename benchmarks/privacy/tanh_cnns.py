"""The small networks that Tramèr and Boneh (ICLR 2021) train end to end, after Papernot et al. (AAAI 2021).

Tanh instead of ReLU keeps the activations, and with them the records' gradients, bounded.
"""

from __future__ import annotations

import itertools

from torch import nn


def cifar10() -> nn.Module:
    """Six convolutions and two linear layers for colour images of 32 × 32 pixels, 550,570 parameters."""
    widths, layers = (3, 32, 32, 64, 64, 128, 128), list[nn.Module]()
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, 10))


def mnist() -> nn.Module:
    """Two convolutions and two linear layers for grey images of 28 × 28 pixels, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
