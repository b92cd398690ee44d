"""The metrics of a round, as sums over blocks of clients, and the detection of invalid values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..algorithms.operators import norms
from ..errors import Diverged
from ..gradients.engine import Block
from .communicator import Communicator, SingleProcess

ROUNDING = 1e-5  # relative: how much single precision may add to the norm of a message


class Meter:
    """Adds up the metrics of a round, block by block.

    They are the mean loss, the mean gradient and how far clients are from it, the memory error mean ‖∇f_i − g_i‖, and
    the messages' norms.

    Where clients make local steps, losses and gradients are those at x, on the batches of the first step, and memories
    are compared with the updates.

    With weights all means are weighted, except the mean of the messages' norms.
    """

    def __init__(self, x: Tensor, weights: Tensor | None = None) -> None:
        """`weights`: n·w_i of the clients that live here; None where all clients have equal weights."""
        self._grad, self._weights = torch.zeros_like(x), weights
        self._loss, self._square, self._error, self._sent, self._longest = x.new_zeros(5)
        self._count: float = 0  # of clients; with weights, the sum of theirs
        self._messages = 0

    def add(self, block: Block) -> None:
        """Add the losses and gradients of a block; call it before the gradients are overwritten."""
        if self._weights is not None:
            weights = self._weights[block.rows]
            self._count += float(weights.sum())
            self._loss += weights @ block.losses
            self._grad += weights @ block.gradients
            self._square += weights @ norms(block.gradients)[:, 0].square()
            return
        self._count += len(block.losses)
        self._loss += block.losses.sum()
        self._grad += block.gradients.sum(0)
        self._square += norms(block.gradients).square().sum()

    def add_distances(self, block: Block, distances: Tensor) -> None:
        """Add ‖∇f_i − g_i‖ ``[c, 1]`` of the block's clients, with the memories before this round."""
        weighted = distances if self._weights is None else self._weights[block.rows, None] * distances
        self._error += weighted.sum()

    def add_messages(self, lengths: Tensor) -> None:
        """Add ‖m_i‖ of the block's clients, without noise."""
        self._messages += len(lengths)
        self._sent += lengths.sum()
        self._longest = torch.maximum(self._longest, lengths.max())

    def merge(self, communicator: Communicator) -> None:
        """Turn the sums over this rank's clients into sums over all clients."""
        if communicator.size == 1:
            return
        scalars = (self._loss, self._square, self._error, self._sent)
        counts = self._grad.new_tensor([self._count, self._messages])
        whole = communicator.sum(torch.cat([self._grad, torch.stack(scalars), counts]))
        self._grad = whole[:-6]
        self._loss, self._square, self._error, self._sent = whole[-6:-2]
        self._count, messages = whole[-2:].tolist()
        self._messages = int(messages)
        self._longest = communicator.max(self._longest.clone())

    def read(self, *, exact: bool, feedback: bool) -> dict[str, Any]:
        """Return the metrics; `exact`: the blocks were all clients' full gradients, so ‖mean gradient‖ is ‖∇f(x)‖."""
        if not self._count:
            return {}
        n = self._count
        sums = (norms(self._grad).squeeze(), self._loss, self._square, self._error, self._sent, self._longest)
        length, loss, square, error, sent, longest = torch.stack(sums).tolist()  # waits for the device only once
        mean = length / n
        found = {"loss": loss / n}
        if exact:
            found["grad_norm"] = mean
        if feedback:
            found["memory_error"] = error / n
        if self._messages:
            found["message_norm"] = sent / self._messages
            found["message_norm_max"] = longest
        # mean ‖∇f_i − ∇f‖² = mean ‖∇f_i‖² − ‖∇f‖², as a root
        found["disagreement"] = max(0.0, square / n - mean**2) ** 0.5
        return found


class Faults:
    """The first round in which a loss or the sum of messages was not finite, or a message was above its bound.

    It is kept on the device at a fixed address, so that recording a fault does not wait for the device and can be part
    of a CUDA graph (`round` is then a tensor on the device). `check` reads it and raises `Diverged`.
    """

    def __init__(self, clients: range, device: torch.device) -> None:
        """`clients`: the clients of this rank."""
        self._never = torch.iinfo(torch.int64).max
        self._clients = clients
        self._on_host = device.type == "cpu"
        self._clean = self._on_host  # on the host it is known without looking that nothing was recorded
        self._loss = torch.full((len(clients),), self._never, device=device)
        self._long = torch.full((len(clients),), self._never, device=device)
        self._sum = torch.full((), self._never, device=device)

    def note_losses(self, block: Block, round: int | Tensor) -> None:
        """Record losses that are not finite."""
        if self._on_host and _finite(block.losses):
            return
        self._note(self._loss, block, torch.isfinite(block.losses), round)

    def note_lengths(self, block: Block, lengths: Tensor, bound: float, round: int | Tensor) -> None:
        """Record messages whose norm ``[c, 1]`` is above the `bound` that the operator states."""
        longest = bound * (1 + ROUNDING)
        if math.isinf(longest) or (self._on_host and float(lengths.max()) <= longest):
            return
        self._note(self._long, block, ~(lengths[:, 0] > longest), round)

    def note_sum(self, total: Tensor, round: int | Tensor) -> None:
        """Record that an entry is not finite; an overflow of the sum of the entries counts as well."""
        if self._on_host and _finite(total):
            return
        self._clean = False
        self._sum.copy_(torch.where(torch.isfinite(total.sum()), self._sum, self._sum.clamp(max=round)))

    @property
    def broken(self) -> Tensor:
        """Whether a fault was recorded on this rank; a boolean on the device."""
        return self._first() != self._never

    def check(self, blame: Callable[[int], list[int]], communicator: Communicator | None = None) -> None:
        """Raise `Diverged` if there is a fault. Collective: all ranks raise the same error.

        `blame(round)` returns the clients whose gradients were not finite although their losses were.
        """
        communicator = communicator or SingleProcess()
        if self._clean and communicator.size == 1:
            return
        here = self._first()
        first = int(here) if communicator.size == 1 else -int(communicator.max(-here))
        if first == self._never:
            return
        found = [finding for finding in communicator.all_gather(self._findings(first, blame)) if finding is not None]
        kind, how, _ = found[0]
        clients = sorted({client for other, _, named in found if other == kind for client in named})
        cure = "the method's `bound` is too small: correct it or the message" if kind == "the message" else ""
        raise Diverged(first, clients, kind, how, cure)

    def _first(self) -> Tensor:
        return torch.minimum(torch.minimum(self._loss.min(), self._long.min()), self._sum)

    def _findings(self, round: int, blame: Callable[[int], list[int]]) -> tuple[str, str, list[int]] | None:
        for kind, how, noted in (
            ("the loss", "is not finite", self._loss),
            ("the message", "is above its bound", self._long),
        ):
            where = (noted == round).nonzero()[:, 0].tolist()
            if where:
                return kind, how, [self._clients[row] for row in where]
        if int(self._sum) == round:
            return "the gradient", "is not finite", blame(round)
        return None

    def _note(self, noted: Tensor, block: Block, good: Tensor, round: int | Tensor) -> None:
        if self._on_host and bool(good.all()):
            return
        self._clean = False
        seen = noted[block.rows]
        noted[block.rows] = torch.where(good, seen, seen.clamp(max=round))


def _finite(values: Tensor) -> bool:
    """Whether the sum of values on the host is finite, which it is only if every one of them is."""
    return math.isfinite(float(values.sum()))
