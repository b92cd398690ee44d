"""The rows of a run's history: their contents, when one is due, and the final measurement of every client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..algorithms.method import Steps
from ..algorithms.operators import norms
from ..errors import Diverged
from ..gradients.engine import Block, Engine
from ..problems.objective import Buffers, Objective
from ..sampling.participation import Rotation
from ..sampling.random_streams import derive_seed, seed_generators
from ..storage.history import COLUMNS, History, Row
from .callbacks import Callback, own_numbers_of, undone_after
from .client_update import ClientUpdate, local_correction
from .communicator import Communicator, gather_buffers, local_part
from .memory_table import read_rows
from .metrics import Meter
from .run import ClientTable, Plan, State

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism


class Observer:
    """Measures the rows of history. Row k describes x^k and is measured in round k before the step.

    It uses the gradients that the round computes anyway.
    """

    def __init__(
        self,
        problem: Objective,
        update: ClientUpdate,
        steps: Steps,
        plan: Plan,
        engine: Engine,
        history: History,
        callbacks: Sequence[Callback],
        mechanism: Mechanism | None,
        communicator: Communicator,
        weights: Tensor | None = None,
    ) -> None:
        """`weights`: n·w_i of the clients that live here; None where all clients have equal weights."""
        self._problem, self._update, self._steps, self._plan, self._engine = problem, update, steps, plan, engine
        self._communicator, self._weights = communicator, weights
        self._history, self._callbacks, self._mechanism = history, callbacks, mechanism
        self._own = communicator.local_clients(problem.clients)
        self._measured: set[str] = set()  # the columns that the problem's evaluation returned
        self._payload = steps.method.payload(steps.message_length, problem.x0.element_size())

    def due(self, k: int) -> bool:
        """Whether round k adds a row."""
        return self._plan.adds_row(k) and not self.observed(k)

    def observed(self, k: int) -> bool:
        """Whether the history ends with the row of x^k, as that of a run that ended there and now goes on."""
        rows = self._history.rows
        return bool(rows) and rows[-1]["round"] == k

    def observe(self, state: State, drawn: Tensor | None, last: bool = False) -> Row:
        """Measure the part of a row that does not use the round's gradients, before the round changes anything.

        The `last` row has an evaluation in any case.
        """
        messages = self._messages(state)
        row: Row = {
            "round": state.round,
            "messages": messages,
            "bytes": self._payload * messages / self._problem.clients,
        }
        if self._plan.diagnostics and self._plan.full_gradient and not self._exact(drawn):
            meter = Meter(state.x, self._weights)
            feedback = self._steps.has_memory and self._plan.local is None  # else memories follow the round's updates
            for block in self._blocks(state, None, full=True):
                meter.add(block)
                if feedback:
                    meter.add_distances(block, distances(block, state.memory))
            meter.merge(self._communicator)
            row |= meter.read(exact=True, feedback=feedback)
        if self._plan.evaluates(state.round) or last:
            # For models that draw random numbers during evaluation.
            seed_generators(derive_seed(self._plan.seed, "evaluation", state.round), state.x.device)
            buffers = gather_buffers(state.buffers, self._communicator)
            with undone_after(self._problem, self._mechanism is not None):  # closures are shared with the copies
                measured = self._communicator.on_rank_zero(lambda: self._problem.evaluate(state.result, buffers))
            self._measured |= measured.keys()
            row |= measured
        return row

    def _messages(self, state: State) -> float:
        """Return the number of messages sent, or its expectation if a gain from secret sampling is claimed.

        The number of clients drawn in a round reveals something about the draws, which the gain requires to be secret.
        """
        rate = self._mechanism.privacy.sampling if self._mechanism is not None else None
        if rate is None or self._plan.diagnostics:
            return state.messages
        if isinstance(self._plan.participation, Rotation):
            return self._plan.participation.expected_messages(self._problem.clients, state.round)
        return rate * self._problem.clients * state.round

    def _blocks(self, state: State, drawn: Tensor | None, *, full: bool = False) -> Iterator[Block]:
        """Yield the gradients of this rank's drawn clients without changing buffers."""
        chosen = local_part(drawn, self._own, self._problem.clients)
        more = {} if full else local_correction(self._steps, state, self._own.start)
        for block in self._engine.blocks(state.x, copied(state.buffers), state.round, chosen, full=full, **more):
            yield block.relative_to(self._own.start)

    def meter(self, state: State) -> Meter | None:
        """Return the meter for a row; None if the run records nothing without noise."""
        return Meter(state.x, self._weights) if self._plan.diagnostics else None

    def record(self, row: Row, meter: Meter | None, drawn: Tensor | None, write: bool) -> None:
        """Add a row to the history, and with `write` to the file."""
        if meter is not None:
            meter.merge(self._communicator)
            # Values that were measured exactly take precedence.
            row = meter.read(exact=self._exact(drawn), feedback=self._steps.has_memory) | row
        if self._mechanism is not None:
            mechanism, k = self._mechanism, row["round"]
            row["epsilon"] = self._communicator.on_rank_zero(lambda: mechanism.epsilon_at(k))
        own = sorted(key for key in row if key in self._measured and key not in COLUMNS)
        row = {key: row[key] for key in (*COLUMNS, *own) if key in row}
        broken = [key for key, value in row.items() if not math.isfinite(value)]
        if broken:
            raise Diverged(row["round"], [], broken[0])
        self._history.append(row)
        if write:
            self._history.write()
        private = self._mechanism is not None
        with own_numbers_of(self._callbacks, private, self._plan.seed, "row", row["round"]):
            for callback in self._callbacks:
                callback.row(row)

    def last(
        self, state: State, drawn: Tensor | None, note: Callable[[Block], None]
    ) -> tuple[Row, Meter | None, ClientTable]:
        """Measure the last row, at x^K without a step, and every drawn client separately.

        Every block is passed to `note`, which looks for values that are not finite, even if nothing is recorded.
        """
        row, meter = self.observe(state, drawn, last=True), self.meter(state)
        if meter is None:
            for block in self._blocks(state, drawn):
                note(block)
            return row, None, {}
        clients: ClientTable = {"client": [], "loss": [], "gradient norm": []}
        if self._steps.has_memory:
            clients["memory error"] = []
        for block in self._blocks(state, drawn):
            note(block)
            meter.add(block)
            clients["client"] += block.clients.tolist()
            clients["loss"] += block.losses.tolist()
            clients["gradient norm"] += norms(block.gradients)[:, 0].tolist()
            if self._steps.has_memory:
                away = distances(block, state.memory)
                clients["memory error"] += away[:, 0].tolist()
            self._update.measure(state, block, meter)
        tables = self._communicator.all_gather(clients)
        clients = {name: [value for table in tables for value in table[name]] for name in clients}
        order = sorted(range(len(clients["client"])), key=clients["client"].__getitem__)
        return row, meter, {name: [column[i] for i in order] for name, column in clients.items()}

    def _exact(self, drawn: Tensor | None) -> bool:
        """Whether the round's gradients are full gradients of all clients."""
        return drawn is None and self._plan.batch_size is None and self._plan.batch_rate is None


def distances(block: Block, memory: Tensor) -> Tensor:
    """Return ‖∇f_i − g_i‖ of the block's clients, ``[c, 1]``; with local steps, of updates instead of gradients."""
    return norms(block.grads - read_rows(memory, block, block.grads))


def copied(buffers: Buffers) -> Buffers:
    """Return a copy of the buffers, so that the clients' buffers stay unchanged."""
    return {name: rows.clone() for name, rows in buffers.items()}


def broken_rows(rows: Tensor) -> list[int]:
    """Return the numbers of the rows that are not finite."""
    found: list[int] = (~torch.isfinite(rows[:, None].flatten(1).sum(-1))).nonzero()[:, 0].tolist()
    return found
