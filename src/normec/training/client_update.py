"""The clients' part of a round, block by block: their messages and their new states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.method import MEMORY, Method, Steps, Tables, fused_form, fused_form_agrees
from ..algorithms.operators import norms
from ..gradients.engine import Block
from ..sampling.random_streams import Key, Stream, derive_seed
from . import fused_update
from .memory_table import read_rows, rounded, write_rows
from .metrics import Faults, Meter
from .run import State

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism


@dataclass(frozen=True)
class Drafted:
    """Messages ``[c, d]`` that have not been sent yet, and drafts of the clients' new states."""

    block: Block
    messages: Tensor
    draft: Tables


def local_correction(steps: Steps, state: State, first: int) -> dict[str, Any]:
    """Return the argument with which an engine corrects local steps, for methods that correct them.

    `first` is the number of this rank's first client.
    """
    if not steps.corrects:
        return {}
    public = steps.broadcast(state.server)

    def correction(clients: Tensor) -> Tensor:
        rows = clients - first
        own = {name: table[rows.to(table.device)].to(state.x.device) for name, table in state.clients.items()}
        return steps.local_correction(own, public)

    return {"correction": correction}


class ClientUpdate:
    """Computes the messages of a run with the method's functions or with its fused form."""

    def __init__(
        self,
        method: Method,
        steps: Steps,
        dimension: int,
        seed: int,
        mechanism: Mechanism | None,
        faults: Faults,
        weights: Tensor | None = None,
    ) -> None:
        """`weights`: n·w_i of the clients that live here; None where all clients have equal weights."""
        self._steps, self._seed, self._mechanism, self._faults = steps, seed, mechanism, faults
        self._weights = weights
        # The bound for which the noise was calibrated, even if the method states another one later.
        self.bound = mechanism.release.bound if mechanism is not None else method.bound
        self._sparse = not math.isfinite(self.bound)
        form = fused_form(method) if not steps.one_by_one else None
        self.form = form if form is not None and fused_form_agrees(method, form, dimension) else None
        # Messages that are scaled differences need not be stored if only their sum is used.
        self.fused = self.form is not None and (mechanism is None or mechanism.takes_sums)
        self.forgets = not steps.ignores_absence and (self.form is None or self.form.keep != 1)
        self._method = method

    def send_fused(self, state: State, block: Block, meter: Meter | None) -> Tensor:
        """Return what the block adds to the round's sum, and update its clients' memories.

        The round must be paid for. The block's gradients are overwritten.
        """
        if self.form is None:
            raise TypeError("the method has no fused form")
        memory, seed = state.clients.get(MEMORY), 0
        if memory is not None and memory.dtype != block.grads.dtype:
            seed = derive_seed(self._seed, "rounding", state.round, int(block.clients[0]))
        sent = fused_update.apply_fused(self.form, block, memory, seed, self.weights_of(block))
        self._faults.note_lengths(block, sent.lengths, self.bound, state.round)
        if meter is not None:
            meter.add_messages(sent.lengths)
            if self.form.memory:
                meter.add_distances(block, sent.distances)
        return sent.total

    def weights_of(self, block: Block) -> Tensor | None:
        """Return n·w_i of the block's clients, ``[c]``; None if all clients have equal weights."""
        return self._weights[block.rows] if self._weights is not None else None

    def draft(self, state: State, block: Block, meter: Meter | None) -> Drafted:
        """Return the block's messages and the drafts of its clients' new states; nothing is sent or changed."""
        own = {name: read_rows(table, block, state.x) for name, table in state.clients.items()}
        key = Key(Stream(self._seed, "operator"), state.round, block.clients)
        if meter is not None and self._steps.has_memory:
            meter.add_distances(block, norms(block.grads - own[MEMORY]))
        messages, draft = self._steps.message(block.grads, own, key, self._steps.broadcast(state.server))
        lengths = norms(messages)
        if meter is not None:
            meter.add_messages(lengths)
        self._faults.note_lengths(block, lengths, self.bound, state.round)
        # Coordinates that are not sent may be invalid, too.
        self._faults.note_sum(block.grads if self._sparse else messages, state.round)
        return Drafted(block, messages, draft)

    def measure(self, state: State, block: Block, meter: Meter) -> None:
        """Measure the messages that the block's clients would send now, without changing anything."""
        if self.form is None:
            self.draft(state, block, meter)
            return
        memory = state.clients.get(MEMORY)
        v = block.grads - read_rows(memory, block, state.x) if memory is not None else block.grads
        distances = norms(v)
        if memory is not None:
            meter.add_distances(block, distances)
        meter.add_messages(self.form.scale(distances) * distances)

    def send(self, state: State, drafted: Drafted) -> Tensor:
        """Return what the block adds to the round's sum, and update its clients' states; the round must be paid for.

        In a private run the mechanism adds up the messages (`Mechanism.send`), and `Mechanism.outgoing` returns their
        sum; the block then adds zero here.
        """
        block, messages, weights = drafted.block, drafted.messages, self.weights_of(drafted.block)
        if self._mechanism is None:
            total = _summed(messages, weights)
        else:
            total = state.x.new_zeros(self._steps.message_length)
            if not self._mechanism.simulated and bool(self._faults.broken):
                return total  # a block after the payment was invalid; the round ends with an error
            messages = self._mechanism.send(messages, block.clients, weights)
        if not state.clients:
            return total
        new = self._steps.commit(drafted.draft, messages)
        for name, table in state.clients.items():
            seed = derive_seed(self._seed, "rounding", state.round, int(block.clients[0]))
            kept = write_rows(table, block, new[name], seed)
            if name == MEMORY and self._mechanism is None and kept.dtype != new[name].dtype:
                # The message is what the rounded memory took, so that ĝ stays the mean of the memories.
                between = self._method.sent_between
                if between is not None:
                    total = _summed(between(drafted.draft[MEMORY], kept.to(new[name])), weights)
        return total

    def idle(self, state: State, drawn: Tensor) -> None:
        """Update the states of the clients that do not take part; `drawn` are the rows of the others, on the host."""
        if not state.clients or not self.forgets:
            return
        seed = derive_seed(self._seed, "forgetting", state.round)
        if self.form is not None:
            fused_update.forget(self.form.keep, state.clients[MEMORY], drawn, seed)
            return
        count = len(next(iter(state.clients.values())))
        away = torch.ones(count, dtype=torch.bool)
        away[drawn] = False
        rows = away.nonzero()[:, 0]
        if not len(rows):
            return
        held = {name: table[rows.to(table.device)].to(state.x.device) for name, table in state.clients.items()}
        held = {name: rows.float() if rows.dtype == torch.bfloat16 else rows for name, rows in held.items()}
        for name, new in self._steps.absent(held).items():
            table = state.clients[name]
            table[rows.to(table.device)] = rounded(new, table.dtype, seed).to(table.device)


def _summed(messages: Tensor, weights: Tensor | None) -> Tensor:
    """Return Σ m_i of rows ``[c, d]``, or Σ ω_i m_i with weights ``[c]``."""
    return messages.sum(0) if weights is None else (messages * weights[:, None]).sum(0)
