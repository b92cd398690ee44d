"""The interface of a problem, as training uses it; `Problem` and `FunctionProblem` implement it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..data.augment import Augment

Buffers = dict[str, Tensor]


class Objective(Protocol):
    """Functions f_1 … f_n of one flat vector x."""

    x0: Tensor
    clients: int
    sizes: Tensor | None
    augment: Augment | None

    @property
    def statistics(self) -> bool: ...

    def client_loss(
        self,
        x: Tensor,
        client: int,
        rows: Tensor | None,
        buffers: Buffers,
        uniforms: Tensor | None,
        divisor: float | None = None,
    ) -> Tensor: ...

    def initial_buffers(self) -> Buffers: ...

    def evaluate(self, x: Tensor, buffers: Buffers) -> dict[str, float]: ...

    def model_at(self, x: Tensor, buffers: Buffers) -> nn.Module | None: ...

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Objective: ...

    def fingerprint(self) -> dict[str, Any]: ...


def checksum(*tensors: Tensor) -> str:
    """Return a short digest of the tensors' bytes."""
    seen = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        seen.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()
