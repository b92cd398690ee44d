"""Models by name, each with the loss that it is trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UsageError, at_least, one_of
from .cnn import GroupNormCNN, SmallCNN
from .linear import Logistic, NonconvexPenalty, Softmax
from .mlp import MLP
from .resnet import ResNet20

__all__ = ["MLP", "MODELS", "GroupNormCNN", "Logistic", "NonconvexPenalty", "ResNet20", "SmallCNN", "Softmax", "build"]

MODELS = ("softmax", "logistic", "mlp", "cnn", "cnn-gn", "resnet20", "resnet20-gn")


@dataclass(frozen=True)
class Built:
    """A model with fresh parameters and its loss, the mean over a batch."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]


def build(name: str, shape: tuple[int, ...], classes: int, *, hidden: int = 64, seed: int = 0) -> Built:
    """Build a model by name, with its loss.

    Args:
        name: One of `MODELS`.
        shape: The shape of an input.
        classes: The number of classes.
        hidden: The number of hidden units of the MLP.
        seed: The same seed gives the same parameters.

    Returns:
        The model and its loss.

    Raises:
        UsageError: The name is unknown, or the model does not fit the inputs or the classes.

    Example:
        >>> built = build("softmax", (64,), classes=10)
        >>> type(built.model).__name__, built.loss.__name__
        ('Softmax', 'cross_entropy')
    """
    one_of(MODELS, model=name)
    at_least(1, hidden=hidden, classes=classes)
    features = int(torch.Size(shape).numel())
    if name == "logistic" and classes != 2:
        raise UsageError(f"logistic regression is for 2 classes, the data has {classes}; use softmax")
    if name in ("cnn", "cnn-gn", "resnet20", "resnet20-gn") and len(shape) != 3:
        raise UsageError(f"{name} needs images [channels, height, width], the data has shape {list(shape)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match name:
            case "logistic":
                return Built(Logistic(features), binary_loss)
            case "softmax":
                return Built(Softmax(features, classes), F.cross_entropy)
            case "mlp":
                return Built(MLP(features, hidden, classes), F.cross_entropy)
            case "cnn":
                return Built(SmallCNN(shape, classes), F.cross_entropy)
            case "cnn-gn":
                return Built(GroupNormCNN(shape, classes), F.cross_entropy)
            case "resnet20":
                return Built(ResNet20(shape[0], classes, norm="batch"), F.cross_entropy)
            case "resnet20-gn":
                return Built(ResNet20(shape[0], classes, norm="group"), F.cross_entropy)
    raise NotImplementedError(f"{name} is in MODELS and has no branch in build")


def binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(1 + exp(−y z)) for classes 0, 1 read as y = −1, +1."""
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))
