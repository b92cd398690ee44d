"""One run under way: the loop over rounds and its checkpoints.

A round, in order: who takes part; a row of history, if one is due, of x as it is now; gradients, block by block; the
messages; a look whether all is finite; with privacy, the release is paid for and the noise added; the server's step.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.method import Method, Steps
from ..algorithms.registry import works_by_rows
from ..errors import BudgetSpent, Diverged, UsageError
from ..gradients.choice import choose_engine
from ..gradients.engine import Block, Engine
from ..problems.objective import Buffers, Objective
from ..problems.problem import Problem
from ..storage.history import Row
from ..storage.run_folder import RunStorage
from ..system.processes import Interrupt
from .budget import Budget
from .callbacks import Callback
from .client_update import ClientUpdate
from .communicator import Communicator, SingleProcess, gather_buffers, local_part
from .graphed_round import GraphedRound
from .interleaved import run_to_end
from .metrics import Faults, Meter
from .observer import Observer, broken_rows, copied
from .repeatability import computation_digest, machine_facts, sums_in_fixed_order
from .run import ClientTable, Plan, Run, State, batches_of, record_clip_of
from .state import checkpoint_size, checkpoint_tensors, initial_state, restored_state
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism


SMALL_FILE = 2**20  # bytes of releases that are no reason for a checkpoint


class TrainingLoop:
    """One run under way: `run` takes it to its end, `steps` round by round."""

    def __init__(
        self,
        problem: Objective,
        method: Method,
        plan: Plan,
        engine: str | Engine,
        storage: RunStorage,
        checkpoint_seconds: float,
        callbacks: Sequence[Callback],
        mechanism: Mechanism | None = None,
        communicator: Communicator | None = None,
        kept: bool = False,
    ) -> None:
        """`storage` has a folder on rank 0 alone; `kept` says on every rank whether there is one."""
        communicator = communicator or SingleProcess()
        self.problem, self.method, self.plan, self.storage = problem, method, plan, storage
        self.mechanism = mechanism
        clip = record_clip_of(mechanism.privacy) if mechanism is not None else None
        batches = batches_of(problem, plan)
        private = mechanism is not None
        self.engine = choose_engine(
            engine, problem, batches, plan.model_seed, clip, plan.precision, plan.rounds, private
        )
        self.callbacks, self.checkpoint_seconds = callbacks, checkpoint_seconds
        self.communicator, self.kept, self.own = communicator, kept, communicator.local_clients(problem.clients)
        # Functions of the caller's own may mix the clients that they see together, for some values only.
        one_by_one = mechanism is not None and not works_by_rows(method)
        self.method_steps = Steps(method, problem.x0, one_by_one)
        self.faults = Faults(self.own, problem.x0.device)
        self.weights = plan.weights[self.own.start : self.own.stop].to(problem.x0) if plan.weights is not None else None
        self.update = ClientUpdate(
            method, self.method_steps, len(problem.x0), plan.seed, mechanism, self.faults, self.weights
        )
        self.observer = Observer(
            problem,
            self.update,
            self.method_steps,
            plan,
            self.engine,
            storage.history,
            callbacks,
            mechanism,
            communicator,
            self.weights,
        )
        self.watch = Stopwatch()
        self.budget = (
            Budget(mechanism, communicator, problem.initial_buffers(), kept) if mechanism is not None else None
        )
        # Noise that cannot be repeated is written down with what it covered; where memories take the noise of single
        # messages, a checkpoint is that record.
        simulated = mechanism is not None and mechanism.simulated
        self.computation = computation_digest(problem, method, plan.participation) if simulated and kept else None
        fresh = mechanism is not None and kept and not self._repeatable
        self.save_every_round = fresh and mechanism is not None and mechanism.keeps_noise
        self.recording = fresh and not self.save_every_round
        self.recorded: dict[int, int] = {}  # rounds whose release is known from before a restart, and their attempts
        able = communicator.size == 1 and not self.recording
        self.graphed = GraphedRound(self.method_steps, plan, problem, mechanism, self.faults, self.update, able)
        self.recalled: int | None = None
        self.begun = self.resumed = False
        self.faulty = self.stopping = self.saving = False  # what the ranks said when they were last heard
        self.asked: Callable[[], bool] = lambda: False
        self.ledger_head: list[Any] | None = None
        self.stopped: str | None = None
        self.clients: ClientTable = {}

    def run(self) -> Run:
        with Interrupt() as interrupt:
            return run_to_end(self.steps(lambda: interrupt.asked))

    def steps(self, asked: Callable[[], bool]) -> Generator[None, None, Run]:
        """Yields after every round, until there is none left or it is `asked` to stop; closes the run's files."""
        try:
            torch.set_num_threads(self.engine.threads)
            state = self._started()
            self.asked = asked
            while not self._stop() and self._advance(state):
                yield
            return self._ended(state)
        finally:
            self.storage.close()
            if self.mechanism is not None:
                self.mechanism.close()

    def _stop(self) -> bool:
        """Whether somebody wants to stop: ranks stop together, after the round in which they were told."""
        return self.asked() if self.communicator.size == 1 else self.stopping

    def _started(self) -> State:
        """The state to start from: the checkpoint's, where there is one."""
        tensors: dict[str, Tensor] = {}

        def found() -> tuple[bool, dict[str, Any] | None, list[Row]]:
            saved = self.storage.load()
            if saved is not None:
                tensors.update(saved[0])
            return self.storage.begun, saved[1] if saved is not None else None, self.storage.history.rows

        self.resumed, facts, self.storage.history.rows = self.communicator.on_rank_zero(found)
        if facts is not None:
            state = self._restored(tensors, facts)
            self._open_ledger()  # what was spent is in there, even if no round is left to run
        else:
            state = self.initial()
        if self.recording:
            attempts = self.communicator.on_rank_zero(lambda: self.storage.releases.following(state.round))
            self.recorded = dict(enumerate(attempts, state.round))
        self.watch.start()
        self.saved_at = -math.inf  # the first round is saved at once, so that a run always has a checkpoint
        return state

    def _advance(self, state: State) -> bool:
        """One more round, and a checkpoint if one is due; False when there is no round left."""
        if state.round >= self.plan.rounds or self.stopped:
            return False
        try:
            self.step(state)
        except BudgetSpent as spent:
            self.stopped = str(spent)
            return False
        for callback in self.callbacks:
            callback.round(state.round)
        if self.begun and (self._time_to_save(state) if self.communicator.size == 1 else self.saving):
            self._save(state)
            self.saved_at, self.saving = time.monotonic(), False
        return True

    def _time_to_save(self, state: State) -> bool:
        if self.save_every_round or time.monotonic() - self.saved_at >= self.checkpoint_seconds:
            return self.kept
        most = max(SMALL_FILE, checkpoint_size(state, self.problem.clients))
        return self.recording and self.storage.releases.size > most

    def _ended(self, state: State) -> Run:
        """The last row, the last checkpoint, and what came out."""
        if state.round == self.plan.rounds and not self.observer.complete:
            self._last_row(state)
        self._save(state)
        model = self.problem.model_at(state.x, gather_buffers(state.buffers, self.communicator))
        spent = self.budget.spent() if self.budget is not None else None
        if self.stopped is None and state.round < self.plan.rounds:
            self.stopped = "interrupted"
        run = Run(
            method=self.method,
            state=state,
            model=model,
            history=self.storage.history,
            timings=self.watch.seconds,
            engine=self.engine.name,
            rounds=self.plan.rounds,
            n=self.problem.clients,
            privacy=spent,
            stopped=self.stopped,
            clients=self.clients,
        )
        for callback in self.callbacks:
            callback.end(run)
        return run

    def step(self, state: State) -> None:
        """Round k: every drawn client one message, the server one step; raises `BudgetSpent` before anything leaves."""
        if self.budget is not None:
            self.budget.begin()
        k, n = state.round, self.problem.clients
        drawn = self.plan.participants(n, k)
        row, meter = None, None
        if self.observer.due(k):
            with self.watch.timed("evaluation"):
                row, meter = self.observer.observe(state, drawn), self.observer.meter(state)
        count = n if drawn is None else len(drawn)
        total: Tensor | None = None
        closed = False
        for block in self.watch.each("gradients", self._blocks(state.x, state.buffers, k, drawn)):
            with self.watch.timed("update"):
                closed = row is None and self.begun and self.graphed.can_run(state, block, count)
                if closed:
                    self._pay(state)
                    self.graphed.run(state, block)
                else:
                    sent = self._send(state, block, meter)
                    total = sent if total is None else total + sent
        if closed:
            self._count(state, count)
            return
        self._pay(state)  # noise leaves even where nobody was drawn
        total = torch.zeros_like(state.x) if total is None else total
        if drawn is not None:
            self.update.idle(state, self._local_rows(drawn))
        total = self._whole(total, state, drawn, looked_at=row is not None)
        if (row is not None or self._on_host or self.recording) and (self.communicator.size == 1 or self.faulty):
            self._check(state)
        self._record_release(k, total)
        if count:
            self._begin(state)
        if row is not None:
            self.observer.record(row, meter, drawn, self.begun)
        with self.watch.timed("update"):
            direction, server = self.method_steps.server_step(total / n, state.server)
            state.x -= self.plan.step_size(k) * direction
            for name, new in server.items():  # recordings know the places of these tensors
                state.server[name] = new if self._on_host else state.server[name].copy_(new)
        self._count(state, count)

    def _send(self, state: State, block: Block, meter: Meter | None) -> Tensor:
        """What a block adds to the sum, once the round is paid for; the clients' states take their messages."""
        if meter is not None:
            meter.add(block)
        self.faults.note_losses(block, state.round)
        if self.update.fused:
            self._pay(state)
            return self.update.send_fused(state, block, meter)
        drafted = self.update.draft(state, block, meter)
        self._pay(state)
        return self.update.send(state, drafted)

    @staticmethod
    def _count(state: State, messages: int) -> None:
        state.messages += messages
        state.round += 1

    def _record_release(self, round: int, total: Tensor) -> None:
        """Keep what has left in `round`, so that a restart need not draw its noise again."""
        mechanism = self.mechanism
        if mechanism is not None and self.recording and round not in self.recorded:
            self.communicator.on_rank_zero(lambda: self.storage.releases.append(round, mechanism.attempt, total))

    def _whole(self, total: Tensor, state: State, drawn: Tensor | None, looked_at: bool) -> Tensor:
        """Σ of all drawn clients' messages, noise included, from the sum over those that live here.

        Ranks say in the same breath whether anything here is broken, whether somebody wants to stop, and, by rank 0's
        clock, whether a checkpoint is due. On a GPU that is heard in rounds that are looked at.
        """
        k = state.round
        if k in self.recorded:
            known = self.communicator.rank == 0
            total = self.storage.releases.read(k, state.x) if known else torch.zeros_like(state.x)
        elif self.mechanism is not None:
            n = self.problem.clients
            variance = self.plan.noise_variance(drawn, n) if self.update.fused else 0
            total = self.mechanism.outgoing(total, len(self.own) / n, variance)
        self.faults.note_sum(total, k)
        if self.communicator.size == 1:
            return total if self.mechanism is None else self.mechanism.received(total, self.problem.x0)
        broken = self.faults.broken
        if self._on_host and bool(broken):
            total = torch.zeros_like(total)  # what is broken stays here
        own = torch.tensor(
            [self.asked(), self.communicator.rank == 0 and self._time_to_save(state)], device=total.device
        )
        signs = torch.cat([broken[None], own])
        with self.watch.timed("communication"):
            packed = self.communicator.sum(torch.cat([total, signs.to(total.dtype)]))
        if self._on_host or looked_at:
            self.faulty, self.stopping, self.saving = (packed[-3:] > 0).tolist()
        total = packed[:-3]
        return total if self.mechanism is None else self.mechanism.received(total, self.problem.x0)

    def _pay(self, state: State) -> None:
        """Before anything of this round leaves: all finite, the folder taken, the ledger paid. Once a round."""
        if self.mechanism is None or self.budget is None:
            return
        if state.round in self.recorded:
            self._recall(state, self.mechanism)
            return
        if self.communicator.size > 1 and self.budget.paid:
            return
        if self._on_host or not self.mechanism.simulated or not self.begun:
            self._check(state)  # whatever it costs: nothing that protects anyone leaves after an error
            self.budget.refuse_moving_state(state.buffers, self._moved_constants())
        self._begin(state)
        self.budget.pay(state.round, self._release_key())

    def _moved_constants(self) -> list[str] | None:
        return self.problem.moved_constants() if isinstance(self.problem, Problem) else None

    def _release_key(self) -> str | None:
        """The name of a release that would come out bit for bit the same if it were made again; None: nothing would.

        It holds what the bits depend on beside the run's public settings: what is computed
        (`repeatability.computation_digest`), where, and by which engine.
        """
        if self.mechanism is None or not self._repeatable:
            return None
        how = (self.computation, getattr(self.engine, "variant", None), str(self.problem.x0.dtype), self._machines)
        facts = (self.mechanism.name, *how)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def _repeatable(self) -> bool:
        known = self.computation is not None and getattr(self.engine, "variant", None) is not None
        return known and sums_in_fixed_order(self.engine.name, self.problem.x0.device)

    @cached_property
    def _machines(self) -> list[Any]:
        """Where the ranks compute, known to all. Collective."""
        return self.communicator.all_gather([torch.get_num_threads(), *machine_facts(self.problem.x0.device)])

    def _recall(self, state: State, mechanism: Mechanism) -> None:
        """In place of paying, once a round: the ledger must know of what was released."""
        if self.recalled == state.round:
            return
        round, attempt = state.round, self.recorded[state.round]
        self._check(state)
        self._begin(state)
        self.communicator.on_rank_zero(lambda: mechanism.recall(round, attempt))
        if self.communicator.rank:
            mechanism.recall(round, attempt)
        self.recalled = round

    def _last_row(self, state: State) -> None:
        drawn = self.plan.participants(self.problem.clients, state.round)
        with self.watch.timed("evaluation"):
            row, meter, self.clients = self.observer.last(
                state, drawn, lambda block: self.faults.note_losses(block, state.round)
            )
        self._check(state)
        self._begin(state)
        self.observer.record(row, meter, drawn, self.begun)

    def _blocks(self, x: Tensor, buffers: Buffers, k: int, drawn: Tensor | None) -> Iterator[Block]:
        """Gradients of the drawn clients that live here, their rows as this rank's tables have them."""
        for block in self.engine.blocks(x, buffers, k, local_part(drawn, self.own, self.problem.clients)):
            yield block.relative_to(self.own.start)

    def _local_rows(self, drawn: Tensor) -> Tensor:
        """The drawn clients' rows here."""
        chosen = local_part(drawn, self.own, self.problem.clients)
        return drawn if chosen is None else chosen - self.own.start

    def _check(self, state: State) -> None:
        """Raise `Diverged` if anything noted so far was not finite."""

        def blame(round: int) -> list[int]:
            # A broken gradient may stay in a client's state.
            tables = [table for table in state.clients.values() if table.is_floating_point()]
            broken = sorted({self.own[place] for table in tables for place in broken_rows(table)})
            if broken or round != state.round:
                return broken
            drawn = self.plan.participants(self.problem.clients, round)
            blocks = self._blocks(state.x, copied(state.buffers), round, drawn)
            return [int(block.clients[i]) for block in blocks for i in broken_rows(block.grads)]

        self.faults.check(blame, self.communicator)

    def _begin(self, state: State) -> None:
        """Once, when the first gradients of this process were found finite: only now may files appear."""
        if self.begun:
            return
        self.communicator.on_rank_zero(self.storage.write_settings)
        for callback in self.callbacks:
            callback.begin(state.round, self.plan.rounds)
        self.communicator.on_rank_zero(self.storage.begin)
        self._open_ledger()
        self.begun = True  # last: what failed is tried again

    def _open_ledger(self) -> None:
        budget = self.budget
        if budget is not None:
            self.communicator.on_rank_zero(lambda: budget.open(self.storage.out, self.ledger_head, self.resumed))

    def initial(self) -> State:
        def noted() -> Iterator[Block]:
            for block in self._blocks(self.problem.x0, self.problem.initial_buffers(), 0, None):
                self.faults.note_losses(block, 0)
                yield block

        plan, folder = self.plan, self.storage.out
        state = initial_state(
            self.problem,
            self.method_steps,
            plan.memory,
            plan.initial_memory,
            noted(),
            folder,
            self.communicator,
            self.weights,
        )
        self._check(state)
        return state

    def _restored(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> State:
        self.watch.seconds |= facts["timings"]
        self.ledger_head = facts.get("ledger")
        if self.mechanism is not None and facts["round"] and not self.ledger_head:
            raise UsageError(
                f"the checkpoint in {self.storage.out} has {facts['round']} private rounds and knows of no ledger that "
                "paid for them; start anew in another folder"
            )
        self.clients = facts.get("clients", {})
        memory, folder = self.plan.memory, self.storage.out
        return restored_state(self.problem, self.method_steps, memory, tensors, facts, folder, self.communicator)

    def _save(self, state: State) -> None:
        self.watch.stop()
        if not self.kept:
            return
        self._check(state)
        if not bool(torch.isfinite(state.x).all()):
            raise Diverged(state.round, [], "x")
        with self.watch.timed("checkpoint"):
            facts = {"messages": state.messages, "timings": self.watch.seconds}
            if self.clients:
                facts["clients"] = self.clients
            if self.mechanism is not None:
                facts["ledger"] = self.mechanism.head
            tensors = checkpoint_tensors(state, self.problem.clients, self.communicator)
            self.communicator.on_rank_zero(lambda: self.storage.save(state.round, tensors, facts))

    @property
    def _on_host(self) -> bool:
        """Where looking at a value costs no wait for a device."""
        return self.problem.x0.device.type == "cpu"
