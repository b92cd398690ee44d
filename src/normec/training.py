"""The round loop: gradients, messages, one step of the server; rows of history; checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import gradients
from .callbacks import Callback
from .errors import Diverged, UsageError, at_least, non_negative, one_of
from .history import History, Row
from .interrupt import Interrupt
from .measure import Faults, Meter
from .methods import Method
from .problem import Buffers, Objective
from .records import checksum
from .sampling import Batches, Everyone, Participation, rounds_of
from .storage import RunStorage
from .streams import Key, Stream

TIMINGS = ("gradients", "update", "evaluation", "checkpoint", "total")
COLUMNS = ("round", "messages", "bytes", "loss", "grad_norm", "memory_error", "test_loss", "accuracy")

Schedule = Callable[[int], float]
InitialMemory = Literal["zero", "gradient"] | Tensor


@dataclass
class State:
    """All that a round changes. Between rounds, without noise, ĝ = mean g_i."""

    round: int
    x: Tensor
    memory: Tensor  # [n, d]; a stateless method's is one row of zeros, expanded
    estimate: Tensor
    buffers: Buffers
    messages: int = 0


@dataclass
class Run:
    """What training leaves behind."""

    method: Method
    state: State
    model: nn.Module | None
    history: History
    timings: dict[str, float]
    engine: str
    rounds: int

    @property
    def x(self) -> Tensor:
        return self.state.x

    @property
    def finished(self) -> bool:
        return self.state.round == self.rounds


@dataclass(frozen=True)
class Plan:
    """How a run is to go, every default filled in."""

    lr: float | Schedule
    rounds: int
    batch_size: int | None
    seed: int
    participation: Participation
    initial_memory: InitialMemory
    log_every: int
    evaluate_every: int
    full_gradient: bool

    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on, in JSON: a checkpoint of another plan is refused."""
        facts = dict(vars(self))
        facts["lr"] = "a schedule" if callable(self.lr) else self.lr
        facts["participation"] = repr(self.participation)
        if isinstance(self.initial_memory, Tensor):
            facts["initial_memory"] = f"given, {checksum(self.initial_memory)}"
        return facts


def train(
    problem: Objective,
    method: Method,
    *,
    lr: float | Schedule,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    participation: Participation | None = None,
    initial_memory: InitialMemory = "zero",
    log_every: int | None = None,
    evaluate_every: int | None = None,
    full_gradient: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
    out: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Minimise `problem` by `method`: x ← x − lr · direction, once a round.

    A round is one message of each client that takes part. Give `rounds`, or `epochs` of the average
    client's records. `batch_size=None` takes full local gradients. `lr` may be a function of the round.
    `initial_memory`: g_i⁰ is zero, the first gradient, or a tensor ``[d]`` or ``[n, d]``; ĝ⁰ = mean g_i⁰.

    A row of history is taken every `log_every` rounds (default: about 500 in all), with the test set every
    `evaluate_every` (default: about 20 times). `full_gradient` records the exact f, ‖∇f‖ and memory error
    even where training uses batches or samples clients, at the cost of a pass over all data a row.

    With `out` the run lives in a folder: killed at any instant, the same call goes on from its last
    checkpoint to the same numbers. The same seed gives the same bits on the same machine, whatever is
    logged, evaluated or interrupted. Ctrl-C ends the run after the current round, with a checkpoint.
    """
    at_least(0, seed=seed)
    non_negative(checkpoint_seconds=checkpoint_seconds)
    if not callable(lr):
        non_negative(lr=lr)
    if batch_size is not None:
        at_least(1, batch_size=batch_size)
        if problem.sizes is None:
            raise UsageError(f"plain functions have no records to take a batch_size of, got {batch_size}")
    problem = problem.to(torch.device(device) if device is not None else problem.x0.device, dtype)
    total = _horizon(problem, rounds, epochs, batch_size)
    plan = Plan(
        lr=lr,
        rounds=total,
        batch_size=batch_size,
        seed=seed,
        participation=participation if participation is not None else Everyone(),
        initial_memory=initial_memory,
        log_every=log_every if log_every is not None else max(1, total // 500),
        evaluate_every=evaluate_every if evaluate_every is not None else max(1, total // 20),
        full_gradient=full_gradient,
    )
    at_least(1, log_every=plan.log_every, evaluate_every=plan.evaluate_every)
    plan.participation.draw(problem.clients, 0, seed)  # refuses what cannot be drawn, before anything starts
    identity = {
        "method": repr(method),
        "dtype": str(problem.x0.dtype),
        **plan.identity(),
        **problem.fingerprint(),
    }
    storage = RunStorage(Path(out) if out is not None else None, identity)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(), torch.backends.cudnn.flags(deterministic=True, benchmark=False):
            under_way = _Rounds(problem, method, plan, engine, storage, checkpoint_seconds, callbacks)
            torch.set_num_threads(under_way.engine.threads)
            return under_way.run()
    finally:
        torch.set_num_threads(threads)
        storage.close()


class _Rounds:
    """One run under way."""

    def __init__(
        self,
        problem: Objective,
        method: Method,
        plan: Plan,
        engine: str,
        storage: RunStorage,
        checkpoint_seconds: float,
        callbacks: Sequence[Callback],
    ) -> None:
        self.problem, self.method, self.plan, self.storage = problem, method, plan, storage
        batches = None
        if plan.batch_size is not None and problem.sizes is not None:
            batches = Batches(problem.sizes, plan.batch_size, plan.seed)
        self.engine = gradients.choose(engine, problem, batches, plan.seed)
        self.callbacks, self.checkpoint_seconds = callbacks, checkpoint_seconds
        self.faults = Faults(problem.clients, problem.x0.device)
        self.timings: dict[str, float] = dict.fromkeys(TIMINGS, 0.0)
        self.payload = method.operator.payload(len(problem.x0), problem.x0.element_size())
        self.begun = False

    def run(self) -> Run:
        saved = self.storage.load()
        state = self._restored(*saved) if saved else self._initial()
        self.before, self.started = self.timings["total"], time.monotonic()
        saved_at = -math.inf  # the first round is saved at once, so that a run always has a checkpoint
        with Interrupt() as interrupt:
            while state.round < self.plan.rounds and not interrupt.asked:
                self._round(state)
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
        run = Run(self.method, state, model, history, self.timings, self.engine.name, self.plan.rounds)
        for callback in self.callbacks:
            callback.end(run)
        return run

    def _round(self, state: State) -> None:
        """Round k: every drawn client one message, the server one step."""
        k, method, n = state.round, self.method, self.problem.clients
        drawn = self.plan.participation.draw(n, k, self.plan.seed)
        row = self._observed(state, drawn) if self._row_due(k) else None
        meter = Meter(state.x) if row is not None else None
        total = torch.zeros_like(state.x)
        count = 0
        if method.decay and drawn is not None:
            idle = torch.ones(n, dtype=torch.bool, device=state.x.device)
            idle[drawn.to(state.x.device)] = False
            state.memory[idle] = method.idle_step(state.memory[idle])
        for block in self._timed_blocks(self.engine.blocks(state.x, state.buffers, k, drawn)):
            with self._timed("update"):
                rows = _rows(block.clients, n)
                memory = state.memory[rows]
                if meter is not None:
                    meter.add(block, memory if method.feedback else None)
                self.faults.note_losses(block, k)
                key = Key(Stream(self.plan.seed, "operator"), k, block.clients)
                message, memory = method.client_step(block.grads, memory, key)
                if method.feedback:
                    state.memory[rows] = memory
                total += message.sum(0)
                count += len(message)
        self.faults.note_sum(total, k)
        if row is not None or self._on_host:
            self._check(state)
        self._begin(state, count)
        if row is not None and meter is not None:
            self._record(row, meter, self._exact(drawn))
        with self._timed("update"):
            direction, state.estimate = method.server_step(total / n, state.estimate)
            state.x -= self._step_size(k) * direction
        state.messages += count
        state.round += 1

    def _last_row(self, state: State) -> None:
        """Measured at x^K like any other row, with no step after it."""
        drawn = self.plan.participation.draw(self.problem.clients, state.round, self.plan.seed)
        row, meter = self._observed(state, drawn), Meter(state.x)
        for block in self._timed_blocks(self.engine.blocks(state.x, _copy(state.buffers), state.round, drawn)):
            meter.add(block, self._memory_of(block, state))
            self.faults.note_losses(block, state.round)
        self._check(state)
        self._begin(state, 1)
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
                row |= self.problem.evaluate(state.x, state.buffers)
        return row

    def _record(self, row: Row, meter: Meter, exact: bool) -> None:
        row = meter.read(exact=exact, feedback=self.method.feedback) | row  # what was observed exactly, stays
        row = {key: row[key] for key in COLUMNS if key in row}
        self.storage.history.append(row)
        if self.begun:
            self.storage.history.write()
        for callback in self.callbacks:
            callback.row(row)

    def _exact(self, drawn: Tensor | None) -> bool:
        """Whether the round's gradients are those of f: all clients, all records."""
        return drawn is None and self.plan.batch_size is None

    def _memory_of(self, block: gradients.Block, state: State) -> Tensor | None:
        return state.memory[_rows(block.clients, self.problem.clients)] if self.method.feedback else None

    def _step_size(self, k: int) -> float:
        lr = self.plan.lr(k) if callable(self.plan.lr) else self.plan.lr
        if not math.isfinite(lr):
            raise UsageError(f"lr must be finite, got {lr} in round {k}")
        return lr

    def _check(self, state: State) -> None:
        """Raise `Diverged` if anything noted so far was not finite."""

        def blame(round: int) -> list[int]:
            if self.method.feedback:  # a broken gradient stays in its client's memory
                return _broken(state.memory)
            if round != state.round:
                return []
            drawn = self.plan.participation.draw(self.problem.clients, round, self.plan.seed)
            blocks = self.engine.blocks(state.x, _copy(state.buffers), round, drawn)
            return [int(block.clients[i]) for block in blocks for i in _broken(block.grads)]

        self.faults.check(blame)

    def _begin(self, state: State, seen: int) -> None:
        """Once, when the first gradients of this process were found finite: only now may files appear."""
        if self.begun or not seen:
            return
        self.begun = True
        self.storage.open()
        for callback in self.callbacks:
            callback.begin(state.round, self.plan.rounds)

    def _initial(self) -> State:
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
            self.storage.save(state.round, tensors, {"messages": state.messages, "timings": self.timings})

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


def _horizon(problem: Objective, rounds: int | None, epochs: int | None, batch_size: int | None) -> int:
    if (rounds is None) == (epochs is None):
        raise UsageError(f"give rounds or epochs, one of them, got rounds={rounds} and epochs={epochs}")
    if rounds is not None:
        at_least(1, rounds=rounds)
        return rounds
    if problem.sizes is None:
        raise UsageError("epochs need records; a problem of plain functions takes rounds")
    return rounds_of(epochs or 0, problem.sizes, batch_size)
