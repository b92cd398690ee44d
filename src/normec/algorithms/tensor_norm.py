"""Server normalisation tensor by tensor: an interpretation of the paper's SN that is not Algorithm 1.

Algorithm 1 divides ĝ by the norm of the whole vector. Code that keeps ĝ as a list of the model's tensors may divide
each tensor by its own norm, so that every layer moves equally far. It may also do so in place: then the messages of the
next round are added to the normalised estimate, and ĝ is no longer the mean of the memories. Both variants exist for
comparison with the paper's numbers. They are not recommended, because no theorem covers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import UsageError, one_of
from .error_feedback import NormEC
from .operators import SmoothedNorm


@dataclass(frozen=True)
class TensorNormEC(NormEC):
    """α-NormEC whose direction is normalised separately on consecutive blocks of `sizes` coordinates."""

    name: ClassVar[str] = "normec-by-tensor"
    sizes: tuple[int, ...] = ()
    in_place: bool = False

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return True

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """((1/n) Σ m_i, ĝ) → (direction, new ĝ); with `in_place`, the new ĝ is the direction."""
        _, estimate = super().server_step(mean_message, state)
        if sum(self.sizes) != len(estimate):
            raise UsageError(f"sizes must add up to the {len(estimate)} parameters, got {sum(self.sizes)}")
        lengths = torch.stack(torch._foreach_norm(list(estimate.split(self.sizes))))
        direction = estimate * SmoothedNorm(0.0).scale(lengths)[_owners(self.sizes, estimate.device)]
        return direction, direction if self.in_place else estimate


def normec(alpha: float, beta: float, server_norm: bool | str, decay: float, sizes: Sequence[int]) -> NormEC:
    """α-NormEC by the names of configuration files; `server_norm` may also be "by-tensor" or "in-place"."""
    if isinstance(server_norm, str):
        one_of(("by-tensor", "in-place"), server_norm=server_norm)
        return TensorNormEC(alpha, beta, True, decay, tuple(sizes), server_norm == "in-place")
    return NormEC(alpha, beta, server_norm, decay)


@lru_cache(maxsize=4)
def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for every coordinate, the number of its tensor."""
    return torch.repeat_interleave(torch.tensor(sizes)).to(device)
