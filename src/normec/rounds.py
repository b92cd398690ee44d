"""One run under way: the loop over rounds and its checkpoints.

A round, in order: who takes part; a row of history, if one is due, of x as it is now; gradients, block by block; the
messages; a look whether all is finite; with privacy, the release is paid for and the noise added; the server's step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from . import gradients, start, update
from .callbacks import Callback
from .errors import Diverged, UsageError
from .interrupt import Interrupt
from .measure import Faults, Meter
from .methods import Method
from .objective import Objective
from .observing import Observer, broken_rows, copied, rows_of
from .operators import norms
from .run import ClientTable, Plan, Run, State, batches_of
from .storage import RunStorage
from .streams import Key, Stream, derive_seed

if TYPE_CHECKING:
    from .privacy.mechanism import Mechanism

Result = TypeVar("Result")
TIMINGS = ("gradients", "update", "evaluation", "checkpoint", "total")


def finished(steps: Generator[None, None, Result]) -> Result:
    """What a generator returns when it has been taken to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Result, end.value)


class Rounds:
    """One run under way: `run` takes it to its end, `steps` round by round."""

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
        batches = batches_of(problem, plan)
        self.engine = gradients.choose(engine, problem, batches, plan.seed, clip, plan.precision, plan.rounds)
        self.callbacks, self.checkpoint_seconds = callbacks, checkpoint_seconds
        self.observer = Observer(problem, method, plan, self.engine, storage.history, callbacks, mechanism)
        self.faults = Faults(problem.clients, problem.x0.device)
        self.timings: dict[str, float] = dict.fromkeys(TIMINGS, 0.0)
        self.sparse = not math.isfinite(method.operator.bound)
        scales = method.operator.scale(torch.ones(1)) is not None
        self.fused = scales and (mechanism is None or mechanism.takes_sums)
        self.first_buffers = problem.initial_buffers() if mechanism is not None else {}
        self.begun = False
        self.ledger_head: list[Any] | None = None
        self.stopped: str | None = None
        self.clients: ClientTable = {}

    def run(self) -> Run:
        with Interrupt() as interrupt:
            return finished(self.steps(lambda: interrupt.asked))

    def steps(self, asked: Callable[[], bool]) -> Generator[None, None, Run]:
        """Yields after every round, until there is none left or it is `asked` to stop; closes the run's files."""
        try:
            torch.set_num_threads(self.engine.threads)
            state = self._started()
            while not asked() and self._advance(state):
                yield
            return self._ended(state)
        finally:
            self.storage.close()
            if self.mechanism is not None:
                self.mechanism.close()

    def _started(self) -> State:
        """The state to start from: the checkpoint's, where there is one."""
        saved = self.storage.load()
        state = self._restored(*saved) if saved else self.initial()
        if saved:
            self._open_ledger()  # what was spent is in there, even if no round is left to run
        self.before, self.started = self.timings["total"], time.monotonic()
        self.saved_at = -math.inf  # the first round is saved at once, so that a run always has a checkpoint
        return state

    def _advance(self, state: State) -> bool:
        """One more round, and a checkpoint if one is due; False when there is no round left."""
        if state.round >= self.plan.rounds or self.stopped:
            return False
        self.stopped = self.step(state)
        if self.stopped:
            return False
        for callback in self.callbacks:
            callback.round(state.round)
        if self.begun and time.monotonic() - self.saved_at >= self.checkpoint_seconds:
            self._save(state)
            self.saved_at = time.monotonic()
        return True

    def _ended(self, state: State) -> Run:
        """The last row, the last checkpoint, and what came out."""
        if state.round == self.plan.rounds and not self.observer.complete:
            self._last_row(state)
        self._save(state)
        model = self.problem.model_at(state.x, state.buffers)
        spent = self.mechanism.spent() if self.mechanism is not None else None
        if self.stopped is None and state.round < self.plan.rounds:
            self.stopped = "interrupted"
        run = Run(
            method=self.method,
            state=state,
            model=model,
            history=self.storage.history,
            timings=self.timings,
            engine=self.engine.name,
            rounds=self.plan.rounds,
            privacy=spent,
            stopped=self.stopped,
            clients=self.clients,
        )
        for callback in self.callbacks:
            callback.end(run)
        return run

    def step(self, state: State) -> str | None:
        """Round k: every drawn client one message, the server one step; or the reason why there is no more."""
        k, method, n = state.round, self.method, self.problem.clients
        drawn = self.plan.participation.draw(n, k, self.plan.seed)
        row, meter = None, None
        if self.observer.due(k):
            with self._timed("evaluation"):
                row, meter = self.observer.observe(state, drawn), Meter(state.x)
        total = torch.zeros_like(state.x)
        count = 0
        for block in self._timed_blocks(self.engine.blocks(state.x, state.buffers, k, drawn)):
            with self._timed("update"):
                if meter is not None:
                    meter.add(block)
                self.faults.note_losses(block, k)
                count += len(block.losses)
                sent = self._fused(state, block) if self.fused else self._by_messages(state, block, meter)
                if isinstance(sent, str):
                    return sent
                if isinstance(sent, update.Sent):
                    total += sent.total
                    if meter is not None:
                        meter.add_messages(sent.lengths)
                        if method.feedback:
                            meter.add_distances(sent.distances)
                else:
                    total += sent
        if self.mechanism is not None:
            reason = self._released(state)  # noise leaves even where nobody was drawn
            if reason:
                return reason
            total = self.mechanism.total(total)
        if method.decay and drawn is not None:
            seed = derive_seed(self.plan.seed, "forgetting", k)
            update.forget(method, state.memory, drawn, seed)
        self.faults.note_sum(total, k)
        if row is not None or self._on_host:
            self._check(state)
        if count:
            self._begin(state)
        if row is not None and meter is not None:
            self.observer.record(row, meter, drawn, self.begun)
        with self._timed("update"):
            direction, state.estimate = method.server_step(total / n, state.estimate)
            state.x -= self.plan.step_size(k) * direction
        state.messages += count
        state.round += 1
        return None

    def _fused(self, state: State, block: gradients.Block) -> update.Sent | str:
        """Messages that are scaled differences, never written out: their sum, and the new memories."""
        if self.mechanism is not None:
            reason = self._released(state)
            if reason:
                return reason
        seed = derive_seed(self.plan.seed, "rounding", state.round, int(block.clients[0]))
        return update.scaled(self.method, block, state.memory, seed)

    def _by_messages(self, state: State, block: gradients.Block, meter: Meter | None) -> Tensor | str:
        """The definition: each client's message, what leaves of it, what its memory takes; returns their sum."""
        k, method = state.round, self.method
        memory = rows_of(block, state.memory)
        key = Key(Stream(self.plan.seed, "operator"), k, block.clients)
        message = method.message(block.grads, memory, key)
        if meter is not None:
            meter.add_messages(norms(message))
            if method.feedback:
                meter.add_distances(norms(block.grads - memory))
        self.faults.note_sum(block.grads if self.sparse else message, k)  # what is not sent may be broken too
        total = torch.zeros_like(state.x)
        if self.mechanism is not None:
            reason = self._released(state)
            if reason:
                return reason
            message = self.mechanism.send(message, block.clients)
        else:
            total = message.sum(0)
        if method.feedback:
            seed = derive_seed(self.plan.seed, "rounding", k, int(block.clients[0]))
            new = update.rounded(method.remember(memory, message), state.memory.dtype, seed)
            state.memory[block.clients.to(state.memory.device)] = new.to(state.memory.device)
            if self.mechanism is None and new.dtype != memory.dtype:  # what the memory took is what is sent
                total = (new.to(memory) - method.idle_step(memory)).sum(0) / method.beta
        return total

    def _released(self, state: State) -> str | None:
        """Before anything of this round leaves: all finite, the folder taken, the ledger paid. Else the reason."""
        from .privacy.ledger import BudgetSpent

        mechanism, k = self.mechanism, state.round
        if mechanism is None:
            return None
        if self._on_host or not mechanism.simulated or not self.begun:
            self._check(state)  # whatever it costs: nothing that protects anyone leaves after an error
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
        drawn = self.plan.participation.draw(self.problem.clients, state.round, self.plan.seed)
        with self._timed("evaluation"):
            row, meter, self.clients = self.observer.last(
                state, drawn, lambda block: self.faults.note_losses(block, state.round)
            )
        self._check(state)
        self._begin(state)
        self.observer.record(row, meter, drawn, self.begun)

    def _check(self, state: State) -> None:
        """Raise `Diverged` if anything noted so far was not finite."""

        def blame(round: int) -> list[int]:
            broken = broken_rows(state.memory) if self.method.feedback else []  # a broken gradient may stay in there
            if broken or round != state.round:
                return broken
            drawn = self.plan.participation.draw(self.problem.clients, round, self.plan.seed)
            blocks = self.engine.blocks(state.x, copied(state.buffers), round, drawn)
            return [int(block.clients[i]) for block in blocks for i in broken_rows(block.grads)]

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
        def noted() -> Iterator[gradients.Block]:
            for block in self.engine.blocks(self.problem.x0, self.problem.initial_buffers(), 0):
                self.faults.note_losses(block, 0)
                yield block

        plan, folder = self.plan, self.storage.out
        state = start.fresh(self.problem, self.method, plan.memory, plan.initial_memory, noted(), folder)
        self._check(state)
        return state

    def _restored(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> State:
        self.timings |= facts["timings"]
        self.ledger_head = facts.get("ledger")
        return start.restored(self.problem, self.plan.memory, tensors, facts, self.storage.out)

    def _save(self, state: State) -> None:
        self.timings["total"] = self.before + time.monotonic() - self.started
        if self.storage.out is None:
            return
        self._check(state)
        if not bool(torch.isfinite(state.x).all()):
            raise Diverged(state.round, [], "x")
        with self._timed("checkpoint"):
            facts = {"messages": state.messages, "timings": self.timings}
            if self.mechanism is not None:
                facts["ledger"] = self.mechanism.head
            self.storage.save(state.round, start.tensors_of(state, self.method.feedback), facts)

    @property
    def _on_host(self) -> bool:
        """Where looking at a value costs no wait for a device."""
        return self.problem.x0.device.type == "cpu"

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
