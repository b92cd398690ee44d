"""Logistic regression on the digits, sorted by label."""

import torch
from torch import nn

from .sorted_digits import data, loss, test

__all__ = ["data", "loss", "model", "test"]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(64, 10)
