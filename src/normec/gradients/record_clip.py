"""How the gradient of one record is bounded before the client's sum is taken: the clip per record.

| `size` | one record's share of the sum | bound C |
| --- | --- | --- |
| a number C | g · min(1, C/‖g‖) | C |
| "auto" | g / (‖g‖ + 0.01), AUTO-S of Bu et al. (arXiv 2206.07136): nothing to tune | 1 |

By layer, each of the model's L trainable tensors is bounded alone, by C/√L, so that the whole has norm at most
√(L · C²/L) = C. A layer with small gradients is then not scaled down because another one has large gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..algorithms.operators import Clip, Scaling, SmoothedNorm

AUTO_SMOOTHING = 0.01  # AUTO-S: the γ that its authors use throughout
Size = float | Literal["auto"]


@dataclass(frozen=True)
class RecordClip:
    """The clip of every record's gradient.

    Args:
        size: The largest norm C, or "auto" for AUTO-S, whose bound is 1.
        by_layer: Whether every trainable tensor is bounded alone.

    Example:
        >>> RecordClip(2.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), sizes=(2,))
        tensor([[1.2000, 1.6000],
                [0.3000, 0.4000]])
        >>> RecordClip("auto").bound
        1.0
    """

    size: Size
    by_layer: bool = False

    @property
    def bound(self) -> float:
        """The bound C of the norm of a record's share."""
        return 1.0 if self.size == "auto" else float(self.size)

    def __call__(self, grads: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the bounded gradients ``[B, d]``; `sizes` are the numbers of elements of the trainable tensors."""
        if not self.by_layer:
            return self._operator(grads)
        parts = [self._operator(part * math.sqrt(len(sizes))) for part in grads.split(list(sizes), dim=1)]
        return torch.cat(parts, dim=1) / math.sqrt(len(sizes))

    def factors(self, norms: Tensor, layers: int = 1) -> Tensor:
        """Return the factors that bound gradients of these norms; `layers` parts of a record are bounded alone."""
        return self._operator.scale(norms * math.sqrt(layers) if layers > 1 else norms)

    @property
    def _operator(self) -> Scaling:
        return SmoothedNorm(AUTO_SMOOTHING) if self.size == "auto" else Clip(float(self.size))
