"""The clients' side of a round, block by block: their messages, what leaves of them, and what their memories take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import update
from .gradients import Block
from .measure import Faults, Meter
from .methods import Method, by_rows, works_by_rows
from .observing import rows_of
from .operators import norms
from .run import State
from .streams import Key, Stream, derive_seed

if TYPE_CHECKING:
    from .privacy.mechanism import Mechanism


Released = Callable[[State], str | None]  # asked before anything of a round leaves: why nothing may, or None


class Sending:
    """Makes the messages of one run."""

    def __init__(
        self,
        method: Method,
        seed: int,
        mechanism: Mechanism | None,
        faults: Faults,
    ) -> None:
        self._method, self._seed, self._mechanism, self._faults = method, seed, mechanism, faults
        # The bound that the noise was calibrated for, whatever the operator says later.
        self.bound = mechanism.release.bound if mechanism is not None else method.operator.bound
        self._sparse = not math.isfinite(self.bound)
        # Steps of the caller's own may mix the clients that they see together, for some values only.
        self.apart = mechanism is not None and not works_by_rows(method)
        # Messages that are scaled differences need never be written out, where nobody looks at single ones.
        self.fused = update.fits(method) and not self.apart and (mechanism is None or mechanism.takes_sums)

    def block(self, state: State, block: Block, meter: Meter | None, released: Released) -> Tensor | str:
        """What the block adds to the round's sum, or the reason why the round cannot be made.

        Uses up the block's gradients; changes its clients' memories.
        """
        make = self._scaled if self.fused else self._by_messages
        return make(state, block, meter, released)

    def _scaled(self, state: State, block: Block, meter: Meter | None, released: Released) -> Tensor | str:
        reason = released(state)
        if reason:
            return reason
        seed = derive_seed(self._seed, "rounding", state.round, int(block.clients[0]))
        sent = update.scaled(self._method, block, state.memory, seed)
        self._faults.note_lengths(block, sent.lengths, self.bound, state.round)
        if meter is not None:
            meter.add_messages(sent.lengths)
            if self._method.feedback:
                meter.add_distances(sent.distances)
        return sent.total

    def _by_messages(self, state: State, block: Block, meter: Meter | None, released: Released) -> Tensor | str:
        """The definition: each client's message, what leaves of it, what its memory takes."""
        k, method = state.round, self._method
        memory = rows_of(block, state.memory)
        memory = memory.clone() if method.feedback else memory  # a method of the caller's own may write to it
        message = self._messages(block, memory, k)
        lengths = norms(message)
        if meter is not None:
            meter.add_messages(lengths)
            if method.feedback:
                meter.add_distances(norms(block.grads - memory))
        self._faults.note_lengths(block, lengths, self.bound, k)
        self._faults.note_sum(block.grads if self._sparse else message, k)  # what is not sent may be broken too
        reason = released(state)
        if reason:
            return reason
        if self._mechanism is not None:
            total = torch.zeros_like(state.x)
            if not self._mechanism.simulated and bool(self._faults.broken):
                return (
                    total  # of a later block than the one that was looked at before paying; the round ends in an error
                )
            message = self._mechanism.send(message, block.clients)
        else:
            total = message.sum(0)
        if method.feedback:
            seed = derive_seed(self._seed, "rounding", k, int(block.clients[0]))
            kept = by_rows(method.remember, memory, message) if self.apart else method.remember(memory, message)
            new = update.rounded(kept, state.memory.dtype, seed)
            state.memory[block.places.to(state.memory.device)] = new.to(state.memory.device)
            if self._mechanism is None and new.dtype != memory.dtype:  # what the memory took is what is sent
                total = (new.to(memory) - method.idle_step(memory)).sum(0) / method.beta
        return total

    def _messages(self, block: Block, memory: Tensor, round: int) -> Tensor:
        stream = Stream(self._seed, "operator")

        def made(grads: Tensor, memory: Tensor, clients: Tensor) -> Tensor:
            return self._method.message(grads, memory, Key(stream, round, clients))

        tables = block.grads, memory, block.clients
        return by_rows(made, *tables) if self.apart else made(*tables)
