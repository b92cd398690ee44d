"""ResNet20 for 32×32 images (He et al. 2016, section 4.2), with option A shortcuts: 269,722 parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import one_of
from .fused_norms import norm_relu

Norm = Callable[[int], nn.Module]


class Shortcut(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and zeros for the missing channels."""

    def __init__(self, stride: int, missing: int) -> None:
        super().__init__()
        self.stride, self.missing, self.before = stride, missing, missing // 2

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.missing - self.before)) if self.missing else x


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = Shortcut(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        out = norm_relu(self.norm1, self.conv1(x))
        return norm_relu(self.norm2, self.conv2(out), self.shortcut(x))


class ResNet20(nn.Module):
    """Three stages of three blocks, 16, 32 and 64 channels.

    Args:
        channels: The number of channels of an image.
        classes: The number of classes.
        norm: "batch" as in the paper, or "group" (8 groups), which has no running statistics and treats every image
            alone: the one to use if a privacy guarantee must cover the whole model.

    Raises:
        UsageError: The norm is unknown.

    Example:
        >>> sum(p.numel() for p in ResNet20().parameters())
        269722
    """

    def __init__(self, channels: int = 3, classes: int = 10, norm: str = "batch") -> None:
        super().__init__()
        one_of(("batch", "group"), norm=norm)
        make: Norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 8)
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.norm = make(16)
        widths = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        self.stages = nn.Sequential(
            *(Block(a if i == 0 else b, b, stride if i == 0 else 1, make) for a, b, stride in widths for i in range(3))
        )
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.stages(norm_relu(self.norm, self.conv(x)))
        pooled: Tensor = self.head(torch.mean(out, dim=(2, 3)))
        return pooled
