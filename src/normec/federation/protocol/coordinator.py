"""The server of a federation without a network: it makes requests, checks replies, and moves x.

    while not coordinator.finished:
        for node, request in coordinator.requests().items(): …      send a request to each party that has not answered
        coordinator.receive(node, fields)                           for each reply, including late ones
        if coordinator.ready: coordinator.close_round()

A reply counts once the checkpoint of its round is on the disk. Parties learn this from the next request, and send the
same message again until then. So a server that is killed at any time continues without losing or repeating a message.
A party that is absent keeps its row g_i, and the sum is always divided by n, so ĝ = Σ w_i g_i whoever answers, with the
weights w_i of the plan (1/n by default).

Under local trust the server's ledger pays for a round before any party is asked. ε is that of the party that may have
released the most messages: those that were accepted, dropped or lost with a disk, and one that is under way.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Method, Steps, Tables
from ...algorithms.registry import identity_of
from ...errors import BudgetSpent, Diverged, UsageError
from ...privacy.mechanism import Mechanism, Spent
from ...privacy.statement import Privacy
from ...problems.client_data import checksum
from ...sampling.participation import drawn_clients
from ...storage.history import UNNOISED, Row
from ...storage.run_folder import RunStorage
from ...training.model_step import ModelStep
from ...training.run import Plan, Run, State
from .collector import Collector, Outcome
from .journal import Journal
from .method_checks import check_client_functions, check_server_functions, public_vector, restorable
from .screening import Limits
from .server_mechanism import mechanism_of, noise_ratios, record_terms
from .server_metrics import due, observed
from .server_state import OPTIMIZER, ServerState
from .terms import LocalTerms, MethodTerms, PlanTerms, PrivacyTerms
from .wire import NAME, Array, Refusal, Reply, Request

JOURNAL = "events.jsonl"
Evaluate = Callable[[Tensor], Mapping[str, float]]
Given = ParamSpec("Given")
Found = TypeVar("Found")


def disk_failure(error: OSError, folder: Path | None) -> str:
    """The error line for a failed write: the file, the reason and the cure."""
    return (
        f"cannot write to {error.filename or folder}: {error.strerror or error}; the run is unchanged; "
        "free space or allow writing there, and start the server again"
    )


def _writes(
    method: Callable[Concatenate[Coordinator, Given], Found],
) -> Callable[Concatenate[Coordinator, Given], Found]:
    """Wrap a method that writes to the run's folder: after a failed write, every further call raises the same error."""

    @functools.wraps(method)
    def guarded(self: Coordinator, /, *given: Given.args, **named: Given.kwargs) -> Found:
        if self._broken is not None:
            raise UsageError(self._broken)
        try:
            return method(self, *given, **named)
        except OSError as error:
            self._broken = self.stopped = disk_failure(error, self.storage.out)
            raise UsageError(self._broken) from None

    return guarded


class Coordinator:
    """A federated run at the server.

    `parties` are names in the order of their client numbers. A round can close once `minimum` parties have answered.
    `evaluate(x)` returns the metrics that the server measures at x. `records` are public numbers, one for each party or
    one for all, by which parties divide their sums of clipped records. The noise of a party is then proportional to
    what one of its own records can change.
    """

    def __init__(
        self,
        method: Method,
        x0: Tensor,
        parties: Sequence[str],
        plan: Plan,
        *,
        run: str,
        privacy: Privacy | None = None,
        folder: str | Path | None = None,
        minimum: int = 1,
        evaluate: Evaluate | None = None,
        records: Sequence[float] | None = None,
    ) -> None:
        check_names(run, parties)
        if not 1 <= minimum <= len(parties):
            raise UsageError(f"minimum must lie between 1 and the {len(parties)} parties, got {minimum}")
        if plan.weights is not None and len(plan.weights) != len(parties):
            raise UsageError(f"weights must be one number for each of the {len(parties)} parties")
        if plan.initial_memory != "zero":
            raise UsageError("a federation supports memories that start at zero")
        self.method, self.plan, self.name, self.parties = method, plan, run, list(parties)
        self.minimum, self._evaluate = minimum, evaluate
        x0 = x0.detach().cpu().clone()
        self._steps = Steps(method, x0)
        check_client_functions(self._steps, x0)
        check_server_functions(self._steps, x0)
        if not restorable(self._steps):
            logging.getLogger("normec").warning(
                "%s does not define follow: a party that loses its disk cannot come back to the run", method.name
            )
        if self._steps.corrects and (plan.local is None or plan.local.scale != "gradient"):
            raise UsageError(f"{method.name} corrects local steps; give local_steps, with local_scale = 'gradient'")
        privacy = privacy.with_noise("secure").for_rounds(plan.rounds) if privacy is not None else None
        clipped = record_terms(privacy, plan, records, len(parties))
        self.mechanism: Mechanism | None = mechanism_of(method, plan, privacy, len(parties), len(x0), clipped)
        sigmas = [self.mechanism.sigma_at(k) for k in range(plan.rounds)] if self.mechanism is not None else [0.0]
        terms = PrivacyTerms.of(privacy, sigmas[0], method)
        self._scheduled = self.mechanism is not None and self.mechanism.release.schedule is not None
        if self._scheduled:
            terms = dataclasses.replace(terms, least_sigma=min(sigmas))
        heaviest = float(plan.weights.max()) if plan.weights is not None else None
        local = LocalTerms.of(plan.local) if plan.local else None
        plans = [PlanTerms(plan.seed, plan.batch_size or 0, plan.rounds, local, heaviest, own) for own in clipped]
        self._terms, self._plans = (MethodTerms.of(method), terms), dict(zip(self.parties, plans, strict=True))
        self._local = privacy is not None and privacy.trust == "local"
        ratios = noise_ratios(method, privacy, plans, len(x0))
        self._ratios = dict(zip(self.parties, ratios.tolist(), strict=True))
        weights = torch.ones_like(ratios) if plan.weights is None else plan.weights
        own_noise = bool((ratios < 1).any())
        # The noise in a sum of messages with unequal noise is that of equal noise under these weights.
        noisy = dataclasses.replace(plan, weights=ratios * weights) if own_noise else plan
        self._model_step = ModelStep(method, noisy, x0, len(parties), self.mechanism)
        largest, length = max(sigmas) if self._local else 0.0, self.message_length
        limits = Limits.of(method, largest, length)
        own_limits = {node: Limits.of(method, largest * ratio, length) for node, ratio in self._ratios.items()}
        self._own_limits = own_limits if own_noise else {}
        identity = {
            "method": identity_of(method),
            "dtype": str(x0.dtype),
            "privacy": privacy.to_dict() if privacy is not None else None,
            **plan.identity(),
            **({"diagnostics": plan.diagnostics} if privacy is not None else {}),
            "run": run,
            "parties": self.parties,
            "start": checksum(x0),
            **({"records": [own.divisor for own in clipped if own is not None]} if clipped[0] is not None else {}),
        }
        self.storage = RunStorage(Path(folder) if folder is not None else None, identity)
        self.storage.open()
        self.journal = Journal(self.storage.out / JOURNAL if self.storage.out is not None else None)
        self.stopped: str | None = None
        self._broken: str | None = None
        self.timings = {"total": 0.0}
        self._since = time.monotonic()
        try:
            self._begin(x0, limits)
        except BaseException:
            self.close()
            raise

    @_writes
    def _begin(self, x0: Tensor, limits: Limits) -> None:
        """Create the state or load it from the folder; it is on the disk before any party is asked."""
        steps, parties, saved = self._steps, self.parties, self.storage.load()
        self.state = ServerState.restored(steps, *saved) if saved else ServerState.fresh(steps, x0, parties)
        if not saved:
            self._model_step.begin(self.state.run)
        self.collector = Collector(self.run, self.state.parties, limits, self.journal, self._own_limits)
        if saved:
            self.timings |= saved[1]["timings"]
            self.journal.note("resumed", round=self.round)
        if self.mechanism is not None and self.storage.out is not None:
            self.mechanism.open(self.storage.out / "ledger.jsonl", saved[1].get("ledger") if saved else None)
        if not saved:
            self._save()
        self._open_round()

    @property
    def run(self) -> str:
        """The identifier that parties know: the name of the run and its random number."""
        return f"{self.name}~{self.state.number}"

    @property
    def round(self) -> int:
        return self.state.run.round

    @property
    def message_length(self) -> int:
        """How many numbers a message has."""
        return self._steps.message_length

    @property
    def finished(self) -> bool:
        return self.round >= self.plan.rounds or self.stopped is not None

    @property
    def waiting(self) -> set[str]:
        """The parties that were asked and have neither answered nor refused."""
        return self.collector.waiting

    @property
    def joining(self) -> set[str]:
        """The parties that started a handshake and wait for the server's record; they can be asked again at once."""
        return self.collector.joining & self.collector.waiting

    @property
    def needed(self) -> int:
        """The number of answers with which this round can close."""
        return min(self.minimum, len(self.collector.asked))

    @property
    def ready(self) -> bool:
        """Whether enough parties have answered for the round to close."""
        return not self.finished and len(self.collector.taken) >= self.needed

    @property
    def answered(self) -> int:
        """The number of messages that were taken in this round."""
        return len(self.collector.taken)

    @property
    def refusals(self) -> dict[str, str]:
        """The parties that refused in this round, with their reasons."""
        return dict(self.collector.refusals)

    @_writes
    def requests(self) -> dict[str, Request]:
        """The requests to all parties that have not answered in this round; call it again to ask again."""
        if self.finished:
            return {}
        if self._local and not self._pay_for_round():
            return {}
        if self.collector.unsaved:  # the counts of handshakes and drops in a request must survive the server
            self._save()
        x = self.state.run.x.numpy().copy()
        method, privacy = self._terms
        if self.mechanism is not None and self._scheduled:
            privacy = dataclasses.replace(privacy, sigma=self.mechanism.sigma_at(self.round))
        public = public_vector(self._steps, self.state.run.server)
        return {
            node: Request(
                run=self.run,
                node=node,
                round=self.round,
                index=self.parties.index(node),
                parties=len(self.parties),
                x=x,
                method=method,
                privacy=privacy.scaled(self._ratios[node]),
                plan=self._plans[node],
                record=self.state.parties[node].to_wire(self._row_to_restore(node)),
                public=public,
            )
            for node in self.collector.asked
            if node in self.waiting
        }

    @_writes
    def receive(self, node: str, given: Mapping[str, Any] | Reply | Refusal) -> Outcome:
        """Process a message from `node`. An invalid one is noted in the journal with its fault and never reaches x."""
        like = self.state.run.x.new_empty(self.message_length).numpy()
        return self.collector.receive(node, given, like, self._row(node))

    @_writes
    def fault(self, node: str, why: str) -> Outcome:
        """Note that `node` sent something that cannot be read as a message."""
        return self.collector.fault(node, why)

    @_writes
    def note_suspension(self, node: str, seconds: float, why: str) -> None:
        """Note in the journal that a party is suspended, and why."""
        self.journal.note("suspended", round=self.round, party=node, seconds=round(seconds, 1), why=why)

    @_writes
    def stop(self, reason: str) -> None:
        """End the run before its last round."""
        self.stopped = reason
        self.journal.note("stopped", round=self.round, reason=reason)

    @_writes
    def repeat_round(self) -> None:
        """Ask the parties that refused once more, in a round with too few answers."""
        refused = len(self.collector.refusals)
        self.journal.note("repeated", round=self.round, answered=len(self.collector.taken), refused=refused)
        self.collector.refusals.clear()

    @_writes
    def close_round(self) -> None:
        """Take the server's step with the messages of this round. It counts once the checkpoint is written."""
        k, taken, state = self.round, self.collector.taken, self.state.run
        if not self.ready:
            raise UsageError(f"round {k} has {len(taken)} answers and needs {self.needed}; wait for more or ask again")
        row = self._observed(taken) if due(self.plan, k) else None
        numbers = [i for i, node in enumerate(self.parties) if node in taken]
        messages = state.x.new_zeros(len(numbers), self.message_length)
        for own, i in zip(messages, numbers, strict=True):
            own.copy_(torch.tensor(taken[self.parties[i]].message))
        total = self._sum(messages, numbers)
        if total is None:
            return
        direction, server = self._steps.server_step(total / len(self.parties), state.server)
        moved = dataclasses.replace(
            state, x=state.x.clone(), optimizer={name: value.clone() for name, value in state.optimizer.items()}
        )
        self._model_step.move(moved, direction, torch.tensor(numbers, dtype=torch.int64))
        server = {name: value.to(state.server[name].dtype) for name, value in server.items()}
        if not bool(torch.isfinite(moved.x).all()):
            raise Diverged(k, [], "x")
        if row is not None:
            self._record(row)
        self._move(moved, server, messages, numbers)
        away = sorted(set(self.collector.asked) - taken.keys())
        if away:
            self.journal.note("away", round=k, parties=away)
        self._save()
        self._open_round()

    def _sum(self, messages: Tensor, numbers: list[int]) -> Tensor | None:
        """The sum of the messages, paid for, with noise under central trust; None if the budget does not allow it."""
        weights = self.plan.weights[numbers].to(messages) if self.plan.weights is not None else None
        total = messages.sum(0) if weights is None else (messages * weights[:, None]).sum(0)
        if self.mechanism is None:
            return total
        if not self._pay_for_round():
            return None
        if self._local:
            return total
        if numbers:
            self.mechanism.send(messages, torch.tensor(numbers), weights)
        noisy = self.mechanism.outgoing(torch.zeros_like(total))
        return self.mechanism.received(noisy, total)

    def _pay_for_round(self) -> bool:
        """Pay for the open round in the ledger; if the budget does not allow it, stop the run and return False.

        Under local trust parties send messages as soon as they are asked, so a round is paid for before that, and only
        once: a party that is asked again sends the same message. A central sum is a new release each time its noise is
        drawn.
        """
        if self.mechanism is None:
            return True
        try:
            if not self._local:
                self.mechanism.pay(self.round)
            while self._local and self.mechanism.releases <= self.round:
                self.mechanism.pay(self.round)
        except BudgetSpent as spent:
            self.stop(str(spent))
            return False
        return True

    def _most_released(self, paid: int) -> tuple[int, str]:
        """The largest number of messages that a party may have released in `paid` rounds, and the party's name.

        If the noise changes by round, a round without a message does not make up for another one with two. Then each
        message that was dropped or lost counts in addition to one message in every round.
        """
        if self._scheduled:
            return max((paid + party.lost, node) for node, party in self.state.parties.items())
        opened = min(self.round + 1, paid)
        return max((party.made(opened), node) for node, party in self.state.parties.items())

    def _epsilon(self, mechanism: Mechanism) -> float:
        """An upper bound of the ε of all releases so far, which is cheap to compute."""
        most = self._most_released(mechanism.releases)[0] if self._local else 0
        return max(mechanism.epsilon(), self._epsilon_of(mechanism, most) if most > mechanism.releases else 0.0)

    def _epsilon_of(self, mechanism: Mechanism, releases: int) -> float:
        if self._scheduled:
            return mechanism.epsilon_with(releases - mechanism.releases)
        return mechanism.release.epsilon(mechanism.sigma, mechanism.privacy.delta, releases)

    def _spent(self) -> Spent | None:
        """The spending of the run: that of the ledger, or of a party that may have released more than its rounds."""
        if self.mechanism is None:
            return None
        spent = self.mechanism.spent()
        most, node = self._most_released(spent.releases)
        if not self._local or most <= spent.releases:
            return spent
        epsilon, target = self._epsilon_of(self.mechanism, most), self.mechanism.privacy.budget
        note = (
            f"{node} may have released {most} messages in {spent.releases} rounds, because disks were lost or "
            f"messages dropped: epsilon is {epsilon:.4g}"
        )
        facts: dict[str, Any] = {"epsilon": epsilon, "releases": most, "beyond_ledger": most - spent.releases}
        if epsilon > target:
            note += f", above the target of {target:g}"
            reached = dataclasses.replace(self.mechanism.privacy, epsilon=math.ceil(epsilon * 1000) / 1000)
            facts |= {"is_target": False, "statement": reached.promise(len(self.parties))}
        return dataclasses.replace(spent, **facts, notes=(*spent.notes, note))

    def _move(self, moved: State, server: Tables, messages: Tensor, numbers: list[int]) -> None:
        """The next round's state: rows take their messages, those of parties that are away do as absent clients."""
        state, steps = self.state.run, self._steps
        if state.clients:
            rows = steps.absent_memory(state.memory.clone()).to(state.memory.dtype, copy=True)
            rows[numbers] = steps.follow(state.memory[numbers], messages).to(rows)
            state.clients[MEMORY] = rows
        for i in numbers:
            self.state.parties[self.parties[i]].accept(self.collector.taken[self.parties[i]].digest, self.round)
        state.x, state.optimizer, state.server = moved.x, moved.optimizer, server
        state.messages += len(numbers)
        state.round += 1

    @_writes
    def finish(self) -> Run:
        """Record the last row and return the result, in the form that every run has."""
        history = self.storage.history
        if self.round == self.plan.rounds and not (history.rows and history.rows[-1]["round"] == self.round):
            self._record(self._observed({}))
        self._save()
        stopped = self.stopped if self.stopped or self.round == self.plan.rounds else "interrupted"
        return Run(
            method=self.method,
            state=self.state.run,
            model=None,
            history=history,
            timings=self.timings,
            engine="federation",
            rounds=self.plan.rounds,
            n=len(self.parties),
            privacy=self._spent(),
            stopped=stopped,
        )

    def close(self) -> None:
        self.storage.close()
        if self.mechanism is not None:
            self.mechanism.close()

    def _open_round(self) -> None:
        drawn = drawn_clients(self.plan.participation, len(self.parties), self.round, self.plan.seed)
        self.collector.open(self.round, self.parties if drawn is None else [self.parties[i] for i in drawn.tolist()])

    def _row(self, node: str) -> Array | None:
        """The sum of the party's accepted messages; None if there are none or the method has no memory."""
        party = self.state.parties.get(node)
        if party is None or not party.accepted or not self.state.run.clients:
            return None
        row: Array = self.state.run.memory[self.parties.index(node)].numpy()
        return row

    def _row_to_restore(self, node: str) -> Array | None:
        """The row for a party that lost its memory; None for a party that has its own."""
        row = self._row(node) if node in self.collector.joining else None
        return row.copy() if row is not None else None

    def _observed(self, taken: Mapping[str, Reply]) -> Row:
        relative = self.plan.weights.tolist() if self.plan.weights is not None else [1.0] * len(self.parties)
        weights = dict(zip(self.parties, relative, strict=True))
        row = observed(self.method, self.state.run, taken.values(), weights, noisy=self._local)
        evaluates = self.round % self.plan.evaluate_every == 0 or self.round == self.plan.rounds
        if self._evaluate is not None and evaluates:
            row |= self._evaluate(self.state.run.result)
        if self.plan.diagnostics:
            return row
        return {name: value for name, value in row.items() if name not in UNNOISED}

    def _record(self, row: Row) -> None:
        if self.mechanism is not None:
            row["epsilon"] = self._epsilon(self.mechanism)
        broken = [key for key, value in row.items() if not math.isfinite(value)]
        if broken:
            raise Diverged(row["round"], [], broken[0])
        self.storage.history.append(row)
        self.storage.history.write()

    def _save(self) -> None:
        now = time.monotonic()
        self.timings["total"] += now - self._since
        self._since = now
        state, facts = self.state.run, {**self.state.facts(), "timings": self.timings}
        if self.mechanism is not None:
            facts["ledger"] = self.mechanism.head
        tensors = {"x": state.x, **{f"server.{name}": value for name, value in state.server.items()}}
        tensors |= {f"client.{name}": rows for name, rows in state.clients.items()}
        tensors |= {f"{OPTIMIZER}{name}": value for name, value in state.optimizer.items()}
        if self.storage.out is not None:
            self._write(tensors, facts)
        self.collector.unsaved = False

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        from safetensors import SafetensorError

        try:
            self.storage.save(self.round, tensors, facts)
        except SafetensorError as error:  # raised by safetensors when a write fails
            raise OSError(str(error)) from None


def check_names(run: str, parties: Sequence[str]) -> None:
    """Check names, which are used in paths and messages: letters, digits, dot, dash, underscore, no repetitions."""
    for name in (run, *parties):
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a run or party; use at most 64 letters, digits, '.', '-' and '_'")
    if not parties or len(set(parties)) != len(parties):
        raise UsageError(
            f"a federation needs at least one party, each with a name of its own; got {len(parties)} names"
        )
