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
    """Functions f_1 … f_n of one flat vector x.

    `x0` is the initial x, `clients` is n, and `sizes` are the numbers of records of the clients; None for functions
    without records. `augment` is applied to training batches.
    """

    x0: Tensor
    clients: int
    sizes: Tensor | None
    augment: Augment | None

    @property
    def statistics(self) -> bool:
        """Whether the buffers are statistics of the data, which no noise covers."""
        ...

    def client_loss(
        self,
        x: Tensor,
        client: int,
        rows: Tensor | None,
        buffers: Buffers,
        uniforms: Tensor | None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return f_i(x) of a client, differentiable in x, and update its `buffers` in place.

        Args:
            x: The point.
            client: The number of the client.
            rows: The numbers of the records to use (None: all).
            buffers: The client's own buffers.
            uniforms: Random numbers in [0, 1) for the augmentation, one row per record.
            divisor: What the sum of the records' losses is divided by (default: the number of records).
        """
        ...

    def initial_buffers(self) -> Buffers:
        """Return the buffers before the first round, with one row per client."""
        ...

    def evaluate(self, x: Tensor, buffers: Buffers) -> dict[str, float]:
        """Return the results at x on the test and validation data, by column of the history."""
        ...

    def model_at(self, x: Tensor, buffers: Buffers) -> nn.Module | None:
        """Return a model with the parameters x, ready for use; None if there is no module."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Objective:
        """Return the same problem on another device, and in another precision."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts by which a checkpoint recognises the problem."""
        ...


def checksum(*tensors: Tensor) -> str:
    """Return a short digest of the tensors' bytes."""
    seen = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        seen.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()
