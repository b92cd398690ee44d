"""Small convolutional networks without running statistics, so that nothing but x depends on the data."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from .fused_norms import norm_relu_pool


class SmallCNN(nn.Sequential):
    """Two 3×3 convolutions with pooling, then two linear layers; 28×28 grey images: 56,714 parameters.

    ReLU comes after pooling, which gives the same result from fewer values.

    Args:
        shape: The shape of an image, ``(channels, height, width)``.
        classes: The number of classes.

    Example:
        >>> import torch
        >>> SmallCNN((1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        channels, _, _ = shape
        super().__init__(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.AdaptiveMaxPool2d(5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 25, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


class GroupNormCNN(nn.Module):
    """Three 3×3 convolutions, each with GroupNorm; colour images: 24,346 parameters.

    With client-level privacy the noise grows with the dimension, and this model has a tenth of ResNet20's parameters.

    Args:
        shape: The shape of an image, ``(channels, height, width)``.
        classes: The number of classes.

    Example:
        >>> import torch
        >>> GroupNormCNN((3, 32, 32), classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        widths = (shape[0], 16, 32, 64)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths[1:])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm_relu_pool(norm, self.pool, conv(x))
        found: Tensor = self.head(x.mean((2, 3)))
        return found
