"""What is measured in a round: sums over blocks of clients, and where something stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import Diverged
from .gradients import Block
from .operators import norms


class Meter:
    """Sums, block by block: the mean loss, the mean gradient and how far clients are from it, the memory error
    mean ‖∇f_i − g_i‖, and the messages' norms.
    """

    def __init__(self, x: Tensor) -> None:
        self._grad = torch.zeros_like(x)
        self._loss, self._square, self._error, self._sent, self._longest = x.new_zeros(5)
        self._count = self._messages = 0

    def add(self, block: Block) -> None:
        """Before anything uses up the block's gradients."""
        self._count += len(block.losses)
        self._loss += block.losses.sum()
        self._grad += block.grads.sum(0)
        self._square += norms(block.grads).square().sum()

    def add_distances(self, distances: Tensor) -> None:
        """‖∇f_i − g_i‖ of the block's clients, with the memories as they are before this round."""
        self._error += distances.sum()

    def add_messages(self, lengths: Tensor) -> None:
        """‖m_i‖ of the block's clients, before any noise."""
        self._messages += len(lengths)
        self._sent += lengths.sum()
        self._longest = torch.maximum(self._longest, lengths.max())

    def read(self, *, exact: bool, feedback: bool) -> dict[str, Any]:
        """`exact`: the blocks were all clients' full gradients, so ‖mean gradient‖ is ‖∇f(x)‖."""
        if not self._count:
            return {}
        n = self._count
        mean = float(norms(self._grad)) / n
        found = {"loss": float(self._loss) / n}
        if exact:
            found["grad_norm"] = mean
        if feedback:
            found["memory_error"] = float(self._error) / n
        if self._messages:
            found["message_norm"] = float(self._sent) / self._messages
            found["message_norm_max"] = float(self._longest)
        # mean ‖∇f_i − ∇f‖² = mean ‖∇f_i‖² − ‖∇f‖², as a root
        found["disagreement"] = max(0.0, float(self._square) / n - mean**2) ** 0.5
        return found


class Faults:
    """The first round in which each client's loss, or the sum of messages, was not finite.

    Kept on the device so that noting it costs no wait; `check` looks, and raises `Diverged`.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self._never = torch.iinfo(torch.int64).max
        self._client = torch.full((clients,), self._never, device=device)
        self._sum = torch.full((), self._never, device=device)

    def note_losses(self, block: Block, round: int) -> None:
        seen = self._client[block.rows]
        self._client[block.rows] = torch.where(torch.isfinite(block.losses), seen, seen.clamp(max=round))

    def note_sum(self, total: Tensor, round: int) -> None:
        # One finite number iff every entry is (or their sum overflows, which is no better).
        self._sum = torch.where(torch.isfinite(total.sum()), self._sum, self._sum.clamp(max=round))

    def check(self, blame: Callable[[int], list[int]]) -> None:
        """`blame(round)` names the clients whose gradients were not finite, where their losses were."""
        first = int(torch.minimum(self._client.min(), self._sum))
        if first == self._never:
            return
        clients = (self._client == first).nonzero()[:, 0].tolist()
        if clients:
            raise Diverged(first, clients, "the loss")
        raise Diverged(first, blame(first), "the gradient")
