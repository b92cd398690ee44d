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
    """Sums, block by block: mean loss, ‖mean gradient‖, and the memory error mean ‖∇f_i − g_i‖."""

    def __init__(self, x: Tensor) -> None:
        self._grad = torch.zeros_like(x)
        self._loss = x.new_zeros(())
        self._error = x.new_zeros(())
        self._count = 0

    def add(self, block: Block, memory: Tensor | None) -> None:
        """`memory`: the rows g_i of the block's clients as they are before this round, if there are any."""
        self._count += len(block.losses)
        self._loss += block.losses.sum()
        self._grad += block.grads.sum(0)
        if memory is not None:
            self._error += norms(block.grads - memory).sum()

    def read(self, *, exact: bool, feedback: bool) -> dict[str, Any]:
        """`exact`: the blocks were all clients' full gradients, so ‖mean gradient‖ is ‖∇f(x)‖."""
        if not self._count:
            return {}
        found = {"loss": float(self._loss) / self._count}
        if exact:
            found["grad_norm"] = float(norms(self._grad)) / self._count
        if feedback:
            found["memory_error"] = float(self._error) / self._count
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
        seen = self._client[block.clients]
        self._client[block.clients] = torch.where(torch.isfinite(block.losses), seen, seen.clamp(max=round))

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
