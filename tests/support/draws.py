"""Random tensors that are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
