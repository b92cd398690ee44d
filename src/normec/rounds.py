"""One run under way: the loop over rounds, its rows of history, its checkpoints.

A round, in order: who takes part; a row of history, if one is due, of x as it is now; gradients, block by block; the
messages; a look whether all is finite; with privacy, the release is paid for and the noise added; the server's step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import gradients
from .callbacks import Callback
from .errors import Diverged, UsageError, one_of
from .history import Row
from .interrupt import Interrupt
from .measure import Faults, Meter
from .methods import Method
from .objective import Buffers, Objective
from .run import Plan, Run, State, batches_of
from .storage import RunStorage
from .streams import Key, Stream, derive_seed, seed_generators

if TYPE_CHECKING:
    from .privacy.mechanism import Mechanism

TIMINGS = ("gradients", "update", "evaluation", "checkpoint", "total")
COLUMNS = (
    *("round", "messages", "bytes", "loss", "grad_norm", "memory_error"),
    *("test_loss", "accuracy", "validation_loss", "validation_accuracy", "epsilon"),
)


class Rounds:
    """One run under way."""

    def __init__(
        self,
        problem: Objective,
        method: Method,
        plan: Plan,
        engine: str | gradients.Engine,
        storage: RunStorage,
        checkpoint_seconds: float,
        callbacks: Sequence[Callback],
        mechanism: Mechanism | None = None,
    ) -> None:
        self.problem, self.method, self.plan, self.storage = problem, method, plan, storage
        self.mechanism = mechanism
        clip = mechanism.privacy.record_clip if mechanism is not None else None
        self.engine = gradients.choose(engine, problem, batches_of(problem, plan), plan.seed, clip)
        self.callbacks, self.checkpoint_seconds = callbacks, checkpoint_seconds
        self.faults = Faults(problem.clients, problem.x0.device)
        self.timings: dict[str, float] = dict.fromkeys(TIMINGS, 0.0)
        self.payload = method.operator.payload(len(problem.x0), problem.x0.element_size())
        self.sparse = not math.isfinite(method.operator.bound)
        self.first_buffers = problem.initial_buffers() if mechanism is not None else {}
        self.begun = False
        self.ledger_head: list[Any] | None = None

    def run(self) -> Run:
        saved = self.storage.load()
        state = self._restored(*saved) if saved else self.initial()
        if saved:
            self._open_ledger()  # what was spent is in there, even if no round is left to run
        self.before, self.started = self.timings["total"], time.monotonic()
        saved_at = -math.inf  # the first round is saved at once, so that a run always has a checkpoint
        stopped: str | None = None
        with Interrupt() as interrupt:
            while state.round < self.plan.rounds and not interrupt.asked:
                stopped = self.step(state)
                if stopped:
                    break
                for callback in self.callbacks:
                    callback.round(state.round)
                if self.begun and time.monotonic() - saved_at >= self.checkpoint_seconds:
                    self._save(state)
                    saved_at = time.monotonic()
            if state.round == self.plan.rounds and not self._complete:
                self._last_row(state)
            self._save(state)
        model = self.problem.model_at(state.x, state.buffers)
        history = self.storage.history
        spent = self.mechanism.spent() if self.mechanism is not None else None
        if stopped is None and state.round < self.plan.rounds:
            stopped = "interrupted"
        run = Run(self.method, state, model, history, self.timings, self.engine.name, self.plan.rounds, spent, stopped)
        for callback in self.callbacks:
            callback.end(run)
        return run

    def step(self, state: State) -> str | None:
        """Round k: every drawn client one message, the server one step; or the reason why there is no more."""
        k, method, n = state.round, self.method, self.problem.clients
        drawn = self.plan.participation.draw(n, k, self.plan.seed)
        row = self._observed(state, drawn) if self._row_due(k) else None
        meter = Meter(state.x) if row is not None else None
        total = torch.zeros_like(state.x)
        count = 0
        for block in self._timed_blocks(self.engine.blocks(state.x, state.buffers, k, drawn)):
            with self._timed("update"):
                rows = _rows(block.clients, n)
                memory = state.memory[rows]
                if meter is not None:
                    meter.add(block, memory if method.feedback else None)
                self.faults.note_losses(block, k)
                key = Key(Stream(self.plan.seed, "operator"), k, block.clients)
                message = method.message(block.grads, memory, key)
                if self.mechanism is not None:
                    self.faults.note_sum(message, k)
                    reason = self._released(state, k)
                    if reason:
                        return reason
                    message = self.mechanism.send(message, block.clients)
                else:
                    total += message.sum(0)
                    if self.sparse:  # what was not sent may be broken too
                        self.faults.note_sum(block.grads, k)
                if method.feedback:
                    state.memory[rows] = method.remember(memory, message)
                count += len(message)
        if self.mechanism is not None:
            reason = self._released(state, k)  # noise leaves even where nobody was drawn
            if reason:
                return reason
            total = self.mechanism.total(state.x)
        if method.decay and drawn is not None:
            idle = torch.ones(n, dtype=torch.bool, device=state.x.device)
            idle[drawn.to(state.x.device)] = False
            state.memory[idle] = method.idle_step(state.memory[idle])
        self.faults.note_sum(total, k)
        if row is not None or self._on_host:
            self._check(state)
        if count:
            self._begin(state)
        if row is not None and meter is not None:
            self._record(row, meter, self._exact(drawn))
        with self._timed("update"):
            direction, state.estimate = method.server_step(total / n, state.estimate)
            state.x -= self._step_size(k) * direction
        state.messages += count
        state.round += 1
        return None

    def _released(self, state: State, k: int) -> str | None:
        """Before anything of round k leaves: all finite, the folder taken, the ledger paid. Else the reason."""
        from .privacy.ledger import BudgetSpent

        mechanism = self.mechanism
        if mechanism is None:
            return None
        self._check(state)  # whatever it costs: nothing leaves after an error
        self._refuse_moving_buffers(state)
        self._begin(state)
        try:
            mechanism.pay(k)
        except BudgetSpent as spent:
            return str(spent)
        return None

    def _refuse_moving_buffers(self, state: State) -> None:
        """A buffer that a forward pass changes is a function of the data that no noise covers."""
        for name, before in self.first_buffers.items():
            if not torch.equal(before, state.buffers[name]):
                raise UsageError(f"the buffer {name} changes with the data and no noise covers it; remove it")

    def _last_row(self, state: State) -> None:
        """Measured at x^K like any other row, with no step after it."""
        drawn = self.plan.participation.draw(self.problem.clients, state.round, self.plan.seed)
        row, meter = self._observed(state, drawn), Meter(state.x)
        for block in self._timed_blocks(self.engine.blocks(state.x, _copy(state.buffers), state.round, drawn)):
            meter.add(block, self._memory_of(block, state))
            self.faults.note_losses(block, state.round)
        self._check(state)
        self._begin(state)
        self._record(row, meter, self._exact(drawn))

    def _observed(self, state: State, drawn: Tensor | None) -> Row:
        """What a row says of x^k beside the round's own gradients; taken before they touch anything."""
        row: Row = {
            "round": state.round,
            "messages": state.messages,
            "bytes": self.payload * state.messages / self.problem.clients,
        }
        with self._timed("evaluation"):
            if self.plan.full_gradient and not self._exact(drawn):
                meter = Meter(state.x)
                for block in self.engine.blocks(state.x, _copy(state.buffers), state.round, full=True):
                    meter.add(block, self._memory_of(block, state))
                row |= meter.read(exact=True, feedback=self.method.feedback)
            if state.round % self.plan.evaluate_every == 0 or state.round == self.plan.rounds:
                # For models that draw while they are evaluated.
                seed_generators(derive_seed(self.plan.seed, "evaluation", state.round), state.x.device)
                row |= self.problem.evaluate(state.x, state.buffers)
        return row

    def _record(self, row: Row, meter: Meter, exact: bool) -> None:
        row = meter.read(exact=exact, feedback=self.method.feedback) | row  # what was observed exactly, stays
        if self.mechanism is not None:
            row["epsilon"] = self.mechanism.epsilon()
        row = {key: row[key] for key in COLUMNS if key in row}
        broken = [key for key, value in row.items() if not math.isfinite(value)]
        if broken:
            raise Diverged(row["round"], [], broken[0])
        self.storage.history.append(row)
        if self.begun:
            self.storage.history.write()
        for callback in self.callbacks:
            callback.row(row)

    def _exact(self, drawn: Tensor | None) -> bool:
        """Whether the round's gradients are those of f: all clients, all records."""
        return drawn is None and self.plan.batch_size is None and self.plan.batch_rate is None

    def _memory_of(self, block: gradients.Block, state: State) -> Tensor | None:
        return state.memory[_rows(block.clients, self.problem.clients)] if self.method.feedback else None

    def _step_size(self, k: int) -> float:
        if k < self.plan.warmup:  # the memories move towards the gradients, x stands still
            return 0.0
        lr = self.plan.lr(k) if callable(self.plan.lr) else self.plan.lr
        if not (math.isfinite(lr) and lr >= 0):
            raise UsageError(f"lr must be >= 0 and finite, got {lr} in round {k}")
        return lr

    def _check(self, state: State) -> None:
        """Raise `Diverged` if anything noted so far was not finite."""

        def blame(round: int) -> list[int]:
            broken = _broken(state.memory) if self.method.feedback else []  # a broken gradient may stay in there
            if broken or round != state.round:
                return broken
            drawn = self.plan.participation.draw(self.problem.clients, round, self.plan.seed)
            blocks = self.engine.blocks(state.x, _copy(state.buffers), round, drawn)
            return [int(block.clients[i]) for block in blocks for i in _broken(block.grads)]

        self.faults.check(blame)

    def _begin(self, state: State) -> None:
        """Once, when the first gradients of this process were found finite: only now may files appear."""
        if self.begun:
            return
        self.begun = True
        self.storage.open()
        for callback in self.callbacks:
            callback.begin(state.round, self.plan.rounds)
        self._open_ledger()

    def _open_ledger(self) -> None:
        if self.mechanism is not None and self.storage.out is not None:
            self.mechanism.open(self.storage.out / "ledger.jsonl", self.ledger_head)

    def initial(self) -> State:
        problem, n, d = self.problem, self.problem.clients, len(self.problem.x0)
        x, start = problem.x0.clone(), self.plan.initial_memory
        state = State(0, x, x.new_zeros(1, d).expand(n, d), torch.zeros_like(x), problem.initial_buffers())
        if not self.method.feedback:
            if not isinstance(start, str) or start != "zero":
                raise UsageError(f"{self.method.name} has no memory; initial_memory must stay 'zero'")
            return state
        state.memory = x.new_zeros(n, d)
        if isinstance(start, Tensor):
            if start.shape not in ((d,), (n, d)) or not bool(torch.isfinite(start).all()):
                raise UsageError(f"initial_memory must be finite, [{d}] or [{n}, {d}], got {list(start.shape)}")
            state.memory += start.to(x)
        else:
            one_of(("zero", "gradient"), initial_memory=start)
            if start == "gradient":
                scratch = problem.initial_buffers()
                for block in self.engine.blocks(x, scratch, 0):
                    self.faults.note_losses(block, 0)
                    state.memory[block.clients] = block.grads
                self._check(state)
        state.estimate = state.memory.mean(0)
        return state

    def _restored(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> State:
        device, n = self.problem.x0.device, self.problem.clients
        held = {name: tensor.to(device) for name, tensor in tensors.items()}
        buffers = {name.removeprefix("buffer."): rows for name, rows in held.items() if name.startswith("buffer.")}
        x = held["x"]
        memory = held["memory"] if "memory" in held else x.new_zeros(1, len(x)).expand(n, len(x))
        self.timings |= facts["timings"]
        self.ledger_head = facts.get("ledger")
        return State(facts["round"], x, memory, held["estimate"], buffers, facts["messages"])

    def _save(self, state: State) -> None:
        self.timings["total"] = self.before + time.monotonic() - self.started
        if self.storage.out is None:
            return
        self._check(state)
        if not bool(torch.isfinite(state.x).all()):
            raise Diverged(state.round, [], "x")
        with self._timed("checkpoint"):
            tensors = {"x": state.x, "estimate": state.estimate}
            if self.method.feedback:
                tensors["memory"] = state.memory
            tensors |= {f"buffer.{name}": rows for name, rows in state.buffers.items()}
            facts = {"messages": state.messages, "timings": self.timings}
            if self.mechanism is not None:
                facts["ledger"] = self.mechanism.head
            self.storage.save(state.round, tensors, facts)

    def _row_due(self, k: int) -> bool:
        return k % self.plan.log_every == 0 or k % self.plan.evaluate_every == 0

    @property
    def _on_host(self) -> bool:
        """Where looking at a value costs no wait for a device."""
        return self.problem.x0.device.type == "cpu"

    @property
    def _complete(self) -> bool:
        rows = self.storage.history.rows
        return bool(rows) and rows[-1]["round"] == self.plan.rounds

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings[part] += time.perf_counter() - start

    def _timed_blocks(self, blocks: Iterator[gradients.Block]) -> Iterator[gradients.Block]:
        while True:
            with self._timed("gradients"):
                block = next(blocks, None)
            if block is None:
                return
            yield block


def _copy(buffers: Buffers) -> Buffers:
    """Buffers to look with: the clients' own stay as they are."""
    return {name: rows.clone() for name, rows in buffers.items()}


def _broken(rows: Tensor) -> list[int]:
    found: list[int] = (~torch.isfinite(rows.sum(-1))).nonzero()[:, 0].tolist()
    return found


def _rows(clients: Tensor, n: int) -> Tensor | slice:
    """All clients in order are a slice: rows then are a view, not a copy."""
    return slice(None) if len(clients) == n else clients
