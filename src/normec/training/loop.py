"""The training loop: rounds and checkpoints.

The order of a round: draw the participating clients; measure a row of history of the current x, if one is due; compute
gradients block by block; make the messages; check that everything is finite; with privacy, pay for the release and add
the noise; make the server's step. docs/architecture.md describes the steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.method import Method, Steps
from ..algorithms.registry import works_by_rows
from ..errors import BudgetSpent, Diverged, UsageError
from ..gradients.choice import choose_engine
from ..gradients.engine import Block, Engine, copies_of
from ..privacy.display import shown_epsilon
from ..problems.objective import Buffers, Objective
from ..problems.problem import Problem
from ..sampling.participation import steady_count
from ..storage.history import NOT_COVERED, Row
from ..storage.run_folder import RunStorage
from ..system.processes import Interrupt
from .budget import Budget
from .callbacks import Callback, RunInProgress, own_numbers_of
from .client_update import ClientUpdate, local_correction
from .communicator import Communicator, SingleProcess, gather_buffers, local_part
from .graphed_round import GraphedRound
from .interleaved import run_to_end
from .metrics import Faults, Meter
from .model_step import ModelStep
from .observer import Observer, broken_rows, copied
from .repeatability import computation_digest, machine_facts, sums_in_fixed_order
from .round_profile import ROUND, RoundProfile
from .run import ClientTable, Plan, Run, State, batches_of, record_clip_of
from .state import checkpoint_size, checkpoint_tensors, initial_state, restored_state, tensor_forms
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism, Spent


COEFFICIENTS = "noise_coefficients"  # the entry of a checkpoint with the coefficients of correlated noise
SMALL_FILE = 2**20  # bytes of releases below which no checkpoint is written because of them


class TrainingLoop:
    """A run that is prepared to start: `run` executes it, and `steps` executes it round by round."""

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
        profiled: bool = False,
    ) -> None:
        """`storage` has a folder on rank 0 only; `kept` says on every rank whether there is one.

        With `profiled`, some rounds of rank 0 are profiled.
        """
        communicator = communicator or SingleProcess()
        self.problem, self.method, self.plan, self.storage = problem, method, plan, storage
        self.mechanism = mechanism
        clip = record_clip_of(mechanism.privacy) if mechanism is not None else None
        batches = batches_of(problem, plan)
        self.engine = choose_engine(
            engine,
            problem,
            batches,
            plan.model_seed,
            clip,
            plan.precision,
            plan.rounds,
            private=mechanism is not None,
            local=plan.local,
            contained=mechanism is not None and not mechanism.simulated,
            drawn=_steadily_drawn(plan, problem.clients, len(communicator.local_clients(problem.clients))),
        )
        self.own_engine = mechanism is not None and not isinstance(engine, str)
        self.callbacks, self.checkpoint_seconds = callbacks, checkpoint_seconds
        self.communicator, self.kept, self.own = communicator, kept, communicator.local_clients(problem.clients)
        # A user's own functions may mix the clients that they see together, for some values only.
        one_by_one = mechanism is not None and not works_by_rows(method)
        self.method_steps = Steps(method, problem.x0, one_by_one)
        self.faults = Faults(self.own, problem.x0.device)
        self.weights = plan.weights[self.own.start : self.own.stop].to(problem.x0) if plan.weights is not None else None
        self.update = ClientUpdate(
            method, self.method_steps, len(problem.x0), plan.seed, mechanism, self.faults, self.weights
        )
        self.model_step = ModelStep(method, plan, problem.x0, problem.clients, mechanism)
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
        private, device = mechanism is not None, problem.x0.device
        self.profile = (
            RoundProfile(storage.out, self.watch, device, private=private) if profiled and storage.out else None
        )
        self.budget = (
            Budget(mechanism, communicator, problem.initial_buffers(), kept) if mechanism is not None else None
        )
        # Noise that cannot be repeated is stored together with the sum that it covers. If memories contain the noise of
        # single messages, or later noise depends on it, a checkpoint in every round stores both.
        simulated = mechanism is not None and mechanism.simulated
        simulated = simulated and (plan.server_optimizer is None or plan.server_optimizer.known)
        self.computation = computation_digest(problem, method, plan.participation) if simulated and kept else None
        fresh = mechanism is not None and kept and not self._repeatable
        correlated = mechanism is not None and mechanism.banded is not None
        self.save_every_round = fresh and mechanism is not None and (mechanism.keeps_noise or correlated)
        self.recording = fresh and not self.save_every_round
        self.recorded: dict[int, int] = {}  # rounds whose release was stored before a restart, and their attempts
        able = communicator.size == 1 and not self.recording and not correlated
        self.graphed = GraphedRound(self.method_steps, plan, problem, mechanism, self.faults, self.update, able)
        self.recalled: int | None = None
        self.begun = self.resumed = self.announced = False
        # The flags of all ranks in the last round in which they were read.
        self.faulty = self.stopping = self.saving = False
        self.asked: Callable[[], bool] = lambda: False
        self.in_progress: RunInProgress | None = None
        self.ledger_head: list[Any] | None = None
        self.stopped: str | None = None
        self.clients: ClientTable = {}

    def run(self, keep: Callable[[Run], None] | None = None) -> Run:
        with Interrupt() as interrupt:
            return run_to_end(self.steps(lambda: interrupt.asked, keep))

    def steps(self, asked: Callable[[], bool], keep: Callable[[Run], None] | None = None) -> Generator[None, None, Run]:
        """Yield after every round until the run ends or `asked` returns True; then close the run's files.

        `keep` writes the files about the result. Every rank calls it, while the run's folder is still locked: another
        process that goes on with the run would remove half-written files, or write the same ones.
        """
        try:
            threads = self.engine.threads
            torch.set_num_threads(threads)
            state = self._started()
            self.asked = asked
            while not self._stop() and self._advance(state):
                yield
                if torch.get_num_threads() != threads:  # another run or a callback changed it
                    torch.set_num_threads(threads)
            run = self._ended(state)
            if keep is not None:
                keep(run)
            return run
        finally:
            if self.profile is not None:
                self.profile.abandon()
            for callback in self.callbacks:
                with suppress(AttributeError):
                    del callback.run  # a callback may outlive the run, whose tables are large
            self.storage.close()
            if self.mechanism is not None:
                self.mechanism.close()

    def _stop(self) -> bool:
        """Whether to stop; ranks stop together, after the round in which they exchanged the request."""
        return self._asked() if self.communicator.size == 1 else self.stopping

    def _asked(self) -> bool:
        """Whether somebody, or a callback, asks this process to stop."""
        return self.asked() or (self.in_progress is not None and self.in_progress.reason is not None)

    def _started(self) -> State:
        """Return the state to start from: that of the checkpoint, if there is one."""
        tensors: dict[str, Tensor] = {}

        def found() -> tuple[bool, dict[str, Any] | None, list[Row]]:
            saved = self.storage.load()
            if saved is not None:
                tensors.update(saved[0])
            return self.storage.begun, saved[1] if saved is not None else None, self.storage.history.rows

        self.resumed, facts, self.storage.history.rows = self.communicator.on_rank_zero(found)
        if facts is not None:
            state = self._restored(tensors, facts)
            self._open_ledger()  # it holds what was spent, even if no round is left
        else:
            state = self.initial()
        if self.recording:
            attempts = self.communicator.on_rank_zero(lambda: self.storage.releases.following(state.round))
            self.recorded = dict(enumerate(attempts, state.round))
        self.in_progress = RunInProgress(
            self.problem,
            state,
            self.storage.history,
            self.plan.rounds,
            self.plan.evaluate_every,
            self.mechanism is not None,
            self.plan.seed,
            partial(_all_buffers, self.communicator, state),  # without the loop, which would hold its engine
        )
        for callback in self.callbacks:
            callback.run = self.in_progress
        if 0 < state.round < self.plan.rounds:  # a run that goes on had finite gradients
            self._announce(state)
        self.watch.start()
        self.saved_at = -math.inf  # save after the first round, so that a run always has a checkpoint
        return state

    def _advance(self, state: State) -> bool:
        """Run one more round, and write a checkpoint if one is due; returns False if no round is left."""
        if state.round >= self.plan.rounds or self.stopped:
            return False
        if self.profile is not None:
            self.profile.before(state.round, self.plan.rounds)
        with self.watch.span(ROUND):
            try:
                self.step(state)
            except BudgetSpent as spent:
                self.stopped = str(spent)
                return False
            with self.watch.span("callbacks"), self._numbers_for_callbacks("round", state.round):
                for callback in self.callbacks:
                    callback.round(state.round)
            if self.begun and (self._time_to_save(state) if self.communicator.size == 1 else self.saving):
                self._save(state)
                self.saved_at, self.saving = time.monotonic(), False
        if self.profile is not None:
            self.profile.after(state.round)
        return True

    def _numbers_for_callbacks(self, function: str, round: int) -> AbstractContextManager[None]:
        return own_numbers_of(self.callbacks, self.mechanism is not None, self.plan.seed, function, round)

    def _time_to_save(self, state: State) -> bool:
        if self.save_every_round or time.monotonic() - self.saved_at >= self.checkpoint_seconds:
            return self.kept
        most = max(SMALL_FILE, checkpoint_size(state, self.problem.clients))
        return self.recording and self.storage.releases.size > most

    def _ended(self, state: State) -> Run:
        """Measure the last row, write the last checkpoint, and return the result."""
        if self.profile is not None:
            self.profile.write(state.round)
        done, before = state.round == self.plan.rounds, self.in_progress
        reason = self.communicator.on_rank_zero(lambda: before.reason if before is not None else None)
        if (done or reason is not None) and not self.observer.observed(state.round):
            self._last_row(state)
        if not self.begun and not state.round:  # interrupted before the first round, which would have opened the files
            self.communicator.on_rank_zero(self.storage.write_settings)
            self._open_files()
        self._save(state)
        model = self.problem.model_at(state.result, gather_buffers(state.buffers, self.communicator))
        spent = self.budget.spent() if self.budget is not None else None
        if self.stopped is None and not done:
            self.stopped = reason or "interrupted"
            if self.budget is not None and spent is not None and reason is not None:
                planned = self.budget.epsilon_to_end(state.round, self._release_key())
                spent = self._spent_on_stop(spent, planned, reason)
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
            settings=dict(self.storage.settings),
            folder=self.storage.out,
            transform=self.problem.evaluation_transform if isinstance(self.problem, Problem) else None,
            payments=self.budget.payments() if self.budget is not None else None,
            majority=self.problem.majority if isinstance(self.problem, Problem) else None,
        )
        with self._numbers_for_callbacks("end", state.round):
            for callback in self.callbacks:
                callback.end(run)
        return run

    def _spent_on_stop(self, spent: Spent, planned: float, reason: str) -> Spent:
        """Return what a private run that a callback stopped has spent.

        The number of rounds then depends on released results, and the ε of the rounds that were made is no guarantee:
        the rule might have stopped elsewhere. That of all planned rounds holds whatever the rule decides; `planned`
        also contains rounds that were released more than once.
        """
        made, rounds = shown_epsilon(spent.epsilon), self.plan.rounds
        notes = [
            f"the run was stopped by a rule that saw its results ({reason}): ε is that of all {rounds} planned rounds, "
            f"because it must hold whatever the rule decides; the rounds that were made amount to {made}"
        ]
        if isinstance(self.problem, Problem) and (self.problem.validation or self.problem.test) is not None:
            notes.append(
                "the results on validation and test records may have decided when to stop; no noise covers these "
                "records, and the guarantee does not protect them"
            )
        if self.plan.diagnostics:
            notes.append(f"the rule could also see values without noise (diagnostics = true), which are {NOT_COVERED}")
        return replace(spent, epsilon=max(spent.epsilon, planned), notes=(*spent.notes, *notes), stopped_by_rule=True)

    def step(self, state: State) -> None:
        """Run one round; raises `BudgetSpent` before anything of the round is released."""
        if self.budget is not None:
            self.budget.begin()
        k, n = state.round, self.problem.clients
        self.method_steps.begin(self.plan.seed, k)
        with self.watch.span("participation"):
            drawn = self.plan.participants(n, k)
        row, meter = None, None
        if self.observer.due(k):
            with self.watch.timed("evaluation"):
                row, meter = self.observer.observe(state, drawn), self.observer.meter(state)
        count = n if drawn is None else len(drawn)
        total: Tensor | None = None
        closed = False
        for block in self.watch.each("gradients", self._blocks(state.x, state.buffers, k, drawn, state)):
            with self.watch.timed("update"):
                closed = row is None and self.begun and self.graphed.can_run(state, block, count)
                if closed:
                    self._pay(state)
                    direction = self.graphed.run(state, block)
                    with self.watch.span("server step"):
                        self.model_step.move(state, direction, drawn)
                else:
                    sent = self._send(state, block, meter)
                    total = sent if total is None else total + sent
        if closed:
            self._count(state, count)
            return
        self._pay(state)  # noise leaves even where nobody was drawn
        self._refuse_late_moves(state)
        total = self._no_messages(state) if total is None else total
        if drawn is not None:
            with self.watch.span("update"):
                self.update.idle(state, self._local_rows(drawn))
        total = self._whole(total, state, drawn, looked_at=row is not None)
        if (row is not None or self._on_host or self.recording) and (self.communicator.size == 1 or self.faulty):
            self._check(state)
        self._record_release(k, total)
        if count:
            self._begin(state)
        if row is not None:
            with self.watch.span("evaluation"):
                self.observer.record(row, meter, drawn, self.begun)
        with self.watch.timed("update"), self.watch.span("server step"):
            direction, server = self.method_steps.server_step(total / n, state.server)
            self.model_step.move(state, direction, drawn)
            for name, new in server.items():  # CUDA graphs refer to the memory of these tensors
                state.server[name] = new if self._on_host else state.server[name].copy_(new)
        if self.mechanism is not None:
            self.mechanism.keep_round(k)
        self._count(state, count)

    def _no_messages(self, state: State) -> Tensor:
        """Return the sum of no messages, which is zero."""
        return state.x.new_zeros(self.method_steps.message_length)

    def _send(self, state: State, block: Block, meter: Meter | None) -> Tensor:
        """Pay for the round, return what a block adds to the sum, and update its clients' states."""
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
        """Store what `round` has released, so that a restart need not draw its noise again."""
        mechanism = self.mechanism
        if mechanism is not None and self.recording and round not in self.recorded:
            self.communicator.on_rank_zero(lambda: self.storage.releases.append(round, mechanism.attempt, total))

    def _whole(self, total: Tensor, state: State, drawn: Tensor | None, looked_at: bool) -> Tensor:
        """Return the sum of all drawn clients' messages, noise included, from the sum over this rank's clients.

        The same all-reduce carries flags: whether a rank has a fault, whether to stop, and, by the clock of rank 0,
        whether a checkpoint is due. On a GPU the flags are read only in rounds with a row of history.
        """
        k = state.round
        if k in self.recorded:
            known = self.communicator.rank == 0
            total = self._no_messages(state)
            total = self.storage.releases.read(k, total) if known else total
        elif self.mechanism is not None:
            n = self.problem.clients
            variance = self.mechanism.variance_of_messages(drawn, self.plan.weights) if self.update.fused else 0
            with self.watch.span("noise"):
                total = self.mechanism.outgoing(total, len(self.own) / n, variance)
        self.faults.note_sum(total, k)
        if self.communicator.size == 1:
            return total if self.mechanism is None else self.mechanism.received(total, self.problem.x0)
        broken = self.faults.broken
        if self._on_host and bool(broken):
            total = torch.zeros_like(total)  # invalid values are not sent to other ranks
        own = torch.tensor(
            [self._asked(), self.communicator.rank == 0 and self._time_to_save(state)], device=total.device
        )
        flags = torch.cat([broken[None], own])
        with self.watch.timed("communication"):
            packed = self.communicator.sum(torch.cat([total, flags.to(total.dtype)]))
        if self._on_host or looked_at:
            self.faulty, self.stopping, self.saving = (packed[-3:] > 0).tolist()
        total = packed[:-3]
        return total if self.mechanism is None else self.mechanism.received(total, self.problem.x0)

    def _pay(self, state: State) -> None:
        """Check values, lock the folder and pay in the ledger, once per round, before anything of it is released."""
        if self.mechanism is None or self.budget is None:
            return
        if state.round in self.recorded:
            self._recall(state, self.mechanism)
            return
        if self.communicator.size > 1 and self.budget.paid:
            return
        if self.method_steps.one_by_one and not self.budget.paid:
            self.communicator.on_rank_zero(self.method_steps.refuse_changes)  # callbacks run on rank 0
        if self._on_host or not self.mechanism.simulated or not self.begun:
            self._check(state)  # even if it waits for the device: real noise must not be released after an error
            self.budget.refuse_moving_state(state.buffers, self._moved_constants())
        self._begin(state)
        with self.watch.span("payment"):
            self.budget.pay(state.round, self._release_key())

    def _refuse_late_moves(self, state: State) -> None:
        """Refuse, before the sums of several ranks leave them, what a block after the payment has moved. Collective.

        One process looks again at every block (`_pay`).
        """
        if self.mechanism is None or self.budget is None or self.communicator.size == 1 or state.round in self.recorded:
            return
        if self._on_host or not self.mechanism.simulated:
            self.budget.refuse_moving_state(state.buffers, self._moved_constants())

    def _moved_constants(self) -> list[str] | None:
        return self.problem.moved_constants(copies_of(self.engine)) if isinstance(self.problem, Problem) else None

    def _release_key(self) -> str | None:
        """Return the key of a release whose repetition would give the same bits; None if no release repeats.

        It covers what the bits depend on besides the run's public settings: the computation
        (`repeatability.computation_digest`), the machine, the engine and the coefficients of correlated noise.
        """
        if self.mechanism is None or not self._repeatable:
            return None
        how = (self.computation, getattr(self.engine, "variant", None), str(self.problem.x0.dtype), self._machines)
        banded = self.mechanism.banded  # another version of SciPy may find other coefficients
        facts = (self.mechanism.name, *how, *([] if banded is None else [banded.coefficients]))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def _repeatable(self) -> bool:
        known = self.computation is not None and getattr(self.engine, "variant", None) is not None
        return known and sums_in_fixed_order(self.engine.name, self.problem.x0.device)

    @cached_property
    def _machines(self) -> list[Any]:
        """Return the machines of all ranks. Collective."""
        return self.communicator.all_gather([torch.get_num_threads(), *machine_facts(self.problem.x0.device)])

    def _recall(self, state: State, mechanism: Mechanism) -> None:
        """Check, instead of paying and once per round, that the ledger contains the stored release."""
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

    def _blocks(
        self, x: Tensor, buffers: Buffers, k: int, drawn: Tensor | None, state: State | None = None
    ) -> Iterator[Block]:
        """Yield the gradients of this rank's drawn clients, with rows relative to this rank's tables.

        Local steps are corrected by the clients' states, where `state` is given and the method does so.
        """
        more = local_correction(self.method_steps, state, self.own.start) if state is not None else {}
        chosen = local_part(drawn, self.own, self.problem.clients)
        found = self.engine.blocks(x, buffers, k, chosen, **more)
        if self.own_engine:
            found = _asked_for(found, self.own if chosen is None else chosen.tolist())
        for block in found:
            yield block.relative_to(self.own.start)

    def _local_rows(self, drawn: Tensor) -> Tensor:
        """Return the rows of the drawn clients in this rank's tables."""
        chosen = local_part(drawn, self.own, self.problem.clients)
        return drawn if chosen is None else chosen - self.own.start

    def _check(self, state: State) -> None:
        """Raise `Diverged` if a fault was recorded."""

        def blame(round: int) -> list[int]:
            # An invalid gradient may have entered a client's state.
            tables = [table for table in state.clients.values() if table.is_floating_point()]
            broken = sorted({self.own[row] for table in tables for row in broken_rows(table)})
            if broken or round != state.round:
                return broken
            drawn = self.plan.participants(self.problem.clients, round)
            blocks = self._blocks(state.x, copied(state.buffers), round, drawn, state)
            return [int(block.clients[i]) for block in blocks for i in broken_rows(block.grads)]

        self.faults.check(blame, self.communicator)

    def _begin(self, state: State) -> None:
        """Start writing files; called when the first gradients are known to be finite, and effective once."""
        if self.begun:
            return
        self.communicator.on_rank_zero(self.storage.write_settings)
        try:
            self._announce(state)
        except UsageError:
            self.storage.withdraw_settings()
            raise
        self._open_files()
        self.begun = True  # last, so that a failed attempt is repeated

    def _open_files(self) -> None:
        """Claim the folder, after config.toml is written, and open the ledger."""
        self.communicator.on_rank_zero(self.storage.begin)
        self._open_ledger()

    def _announce(self, state: State) -> None:
        """Tell the callbacks, once, that the run begins or goes on."""
        if not self.announced:
            with self._numbers_for_callbacks("begin", state.round):
                for callback in self.callbacks:
                    callback.begin(state.round, self.plan.rounds)
        self.announced = True

    def _open_ledger(self) -> None:
        budget = self.budget
        if budget is not None:
            self.communicator.on_rank_zero(lambda: budget.open(self.storage.out, self.ledger_head, self.resumed))

    def initial(self) -> State:
        """Return the state before round 0."""

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
        self.model_step.begin(state)
        if self.mechanism is not None:
            state.noise = self.mechanism.empty_past(self._no_messages(state))
            self.mechanism.correlate(state.noise)
        return state

    def _restored(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> State:
        self.watch.seconds |= facts["timings"]
        self.ledger_head = facts.get("ledger")
        if self.mechanism is not None and facts["round"] and not self.ledger_head:
            raise UsageError(
                f"the checkpoint in {self.storage.out} has {facts['round']} private rounds, but no ledger that "
                "paid for them; start again in another folder"
            )
        self.clients = facts.get("clients", {})
        memory, folder = self.plan.memory, self.storage.out
        state = restored_state(self.problem, self.method_steps, memory, tensors, facts, folder, self.communicator)
        if self.mechanism is not None:
            self.mechanism.correlate(state.noise, facts.get(COEFFICIENTS))
        return state

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
            if state.optimizer:
                facts["optimizer"] = tensor_forms(state.optimizer)
            if self.mechanism is not None:
                facts["ledger"] = self.mechanism.head
            if self.mechanism is not None and self.mechanism.banded is not None:
                facts |= {"noise": tensor_forms(state.noise), COEFFICIENTS: list(self.mechanism.banded.coefficients)}
            tensors = checkpoint_tensors(state, self.problem.clients, self.communicator)
            self.communicator.on_rank_zero(lambda: self.storage.save(state.round, tensors, facts))

    @property
    def _on_host(self) -> bool:
        """Whether reading a value does not wait for a device."""
        return self.problem.x0.device.type == "cpu"


def _steadily_drawn(plan: Plan, clients: int, own: int) -> int | None:
    """Return how many of a rank's `own` clients take part in every round: 0 if that varies, None for all clients."""
    count = steady_count(plan.participation, clients)
    if count == clients:
        return None if own == clients else own
    return count if count is not None and own == clients else 0


def _asked_for(blocks: Iterator[Block], clients: Iterable[int]) -> Iterator[Block]:
    """Yield the blocks of a user's own engine; a client that takes part sends one message, and no other sends any."""
    left = set(clients)
    for block in blocks:
        for client in block.clients.tolist():
            if client not in left:
                raise UsageError(
                    f"the engine computes client {client}, which does not take part in this round or was computed "
                    "before, so no epsilon covers its message; compute each of the clients that are asked for once"
                )
            left.remove(client)
        yield block


def _all_buffers(communicator: Communicator, state: State) -> Buffers:
    """Return the buffers of all clients, for a callback on rank 0."""
    if communicator.size > 1 and state.buffers:
        raise UsageError(
            f"a callback cannot evaluate a model with buffers whose clients live on {communicator.size} ranks; read "
            "the results from the rows of history, or start one process"
        )
    return state.buffers
