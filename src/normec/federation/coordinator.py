"""The server's side of a federation, without a network: whom to ask, what to take, when x moves.

    while not coordinator.finished:
        for node, request in coordinator.requests().items(): …      ask again whoever has not answered
        coordinator.receive(node, fields)                           as replies come in, late ones too
        if coordinator.ready: coordinator.close_round()

A reply counts once the checkpoint of its round is on the disk; parties hear of it in the next request, and send the
same message again until then. So a server killed at any instant goes on with nothing lost and nothing counted twice.
A party that is away keeps its row g_i, and the sum is always divided by n: ĝ = mean g_i whoever answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import Diverged, UsageError
from ..history import Row
from ..methods import Method
from ..privacy.ledger import BudgetSpent
from ..privacy.mechanism import Mechanism
from ..privacy.statement import Privacy
from ..records import checksum
from ..run import Plan, Run
from ..storage import RunStorage
from .journal import Journal
from .observing import due, observed
from .privacy import mechanism_of
from .screening import longest, read, screened
from .server_state import Seat, ServerState
from .terms import MethodTerms, PlanTerms, PrivacyTerms
from .wire import NAME, Array, Refusal, Reply, Request, WireError

JOURNAL = "events.jsonl"
Outcome = Literal["taken", "duplicate", "dropped", "refused", "hello", "late"]
Evaluate = Callable[[Tensor], Mapping[str, float]]


class Coordinator:
    """One federated run under way. `parties` are names, in the order of their client numbers.

    `minimum`: so many must have answered before a round may close. `evaluate(x)`: what the server measures at x.
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
    ) -> None:
        check_names(run, parties)
        if not 1 <= minimum <= len(parties):
            raise UsageError(f"minimum must lie between 1 and the {len(parties)} parties, got {minimum}")
        if plan.batch_rate is not None or plan.initial_memory != "zero":
            raise UsageError("a federation takes batch_size or full gradients, and starts with memories of zero")
        self.method, self.plan, self.name, self.parties = method, plan, run, list(parties)
        self.minimum, self._evaluate = minimum, evaluate
        x0 = x0.detach().cpu().clone()
        self.mechanism: Mechanism | None = mechanism_of(method, plan, privacy, len(parties), len(x0))
        sigma = self.mechanism.sigma if self.mechanism is not None else 0.0
        self._terms = (
            MethodTerms.of(method),
            PrivacyTerms.of(privacy, sigma, method),
            PlanTerms(plan.seed, plan.batch_size or 0, plan.rounds),
        )
        self._local = privacy is not None and privacy.trust == "local"
        self._limit = longest(method, sigma if self._local else 0.0, len(x0))
        identity = {
            "method": repr(method),
            "dtype": str(x0.dtype),
            "privacy": privacy.to_dict() if privacy is not None else None,
            **plan.identity(),
            "run": run,
            "parties": self.parties,
            "start": checksum(x0),
        }
        self.storage = RunStorage(Path(folder) if folder is not None else None, identity)
        self.storage.open()
        self.journal = Journal(self.storage.out / JOURNAL if self.storage.out is not None else None)
        self.stopped: str | None = None
        self._unsaved = False
        self.timings = {"total": 0.0}
        self._since = time.monotonic()
        saved = self.storage.load()
        self.state = ServerState.restored(method, *saved) if saved else ServerState.fresh(method, x0, parties)
        if saved:
            self.timings |= saved[1]["timings"]
            self.journal.note("resumed", round=self.round)
        if self.mechanism is not None and self.storage.out is not None:
            self.mechanism.open(self.storage.out / "ledger.jsonl", saved[1].get("ledger") if saved else None)
        if not saved:
            self._save()
        self._open_round()

    @property
    def round(self) -> int:
        return self.state.run.round

    @property
    def finished(self) -> bool:
        return self.round >= self.plan.rounds or self.stopped is not None

    @property
    def waiting(self) -> set[str]:
        """Who was asked and has neither answered nor refused."""
        return set(self._asked) - self._taken.keys() - self._refusals.keys()

    @property
    def greeting(self) -> set[str]:
        """Who said hello and waits for the server's record: worth asking again at once."""
        return self._greeting & self.waiting

    @property
    def ready(self) -> bool:
        """Whether enough have answered for the round to close."""
        return not self.finished and len(self._taken) >= min(self.minimum, len(self._asked))

    @property
    def refusals(self) -> dict[str, str]:
        """Who refused in this round, and with which word."""
        return dict(self._refusals)

    @property
    def answered(self) -> int:
        """How many messages were taken in this round."""
        return len(self._taken)

    def requests(self) -> dict[str, Request]:
        """What to send to everyone who has not answered in this round yet; call it again to ask again."""
        if self.finished:
            return {}
        if self._unsaved:  # what a party is told of hellos and drops must outlive the server
            self._save()
        x = self.state.run.x.numpy().copy()
        method, privacy, plan = self._terms
        return {
            node: Request(
                run=self.name,
                node=node,
                round=self.round,
                index=self.parties.index(node),
                parties=len(self.parties),
                x=x,
                method=method,
                privacy=privacy,
                plan=plan,
                record=self.state.seats[node].record(self._row(node)),
            )
            for node in self._asked
            if node in self.waiting
        }

    def receive(self, node: str, given: Mapping[str, Any] | Reply | Refusal) -> Outcome:
        """A message that came from `node`. Whatever is wrong with it is named in the journal, and never reaches x."""
        seat = self.state.seats.get(node)
        if seat is None:
            return self._drop("?", None, "it comes from nobody of this federation")
        try:
            message = read(given, len(self.state.run.x))
        except WireError as error:
            return self._drop(node, seat, str(error))
        if not isinstance(message, Reply | Refusal):
            return self._drop(node, seat, "it is neither a reply nor a refusal")
        if message.run != self.name or message.node != node:
            return self._drop(node, seat, "it names another run or party")
        if isinstance(message, Refusal):
            return self._refusal(node, seat, message)
        if node in self._taken:
            if message.digest == self._taken[node].digest:
                return self._note("duplicate", node, step=message.step)
            return self._drop(node, seat, "it differs from the message already taken in this round")
        if message.step <= seat.accepted:
            return self._note("duplicate", node, step=message.step)
        fault = screened(message, seat, self.state.run.x.numpy(), self._limit)
        if fault is not None:
            if fault.known and seat.dropped != message.digest:
                seat.dropped, seat.drops, self._unsaved = message.digest, seat.drops + 1, True
            return self._drop(node, seat, fault.reason)
        if message.round != self.round:
            self._note("late", node, step=message.step, computed=message.round)
        self._taken[node] = message
        self._refusals.pop(node, None)
        self._greeting.discard(node)
        return "taken"

    def fault(self, node: str, why: str) -> Outcome:
        """Something came from `node` that was no message at all."""
        seat = self.state.seats.get(node)
        return self._drop(node if seat is not None else "?", seat, why)

    def stop(self, reason: str) -> None:
        """No more rounds."""
        self.stopped = reason
        self.journal.note("stopped", round=self.round, reason=reason)

    def repeat_round(self) -> None:
        """Ask those who refused once more: for a round that too few have answered."""
        self.journal.note("repeated", round=self.round, answered=len(self._taken), refused=len(self._refusals))
        self._refusals.clear()

    def close_round(self) -> None:
        """The server's step with what was taken; nothing of it counts before the checkpoint is written."""
        if not self.ready:
            raise UsageError(
                f"round {self.round} has {len(self._taken)} answers and needs {min(self.minimum, len(self._asked))}; "
                "wait, or ask again"
            )
        state, method, k, n = self.state.run, self.method, self.round, len(self.parties)
        row = self._observed(self._taken) if due(self.plan, k) else None
        taken = [node for node in self.parties if node in self._taken]
        messages = torch.from_numpy(np.stack([self._taken[node].message for node in taken])) if taken else None
        numbers = torch.tensor([self.parties.index(node) for node in taken], dtype=torch.int64)
        total = torch.zeros_like(state.x) if messages is None else messages.sum(0)
        if self.mechanism is not None:
            try:
                self.mechanism.pay(k)
            except BudgetSpent as spent:
                self.stop(str(spent))
                return
            if not self._local:
                if messages is not None:
                    self.mechanism.send(messages, numbers)
                total = self.mechanism.total(torch.zeros_like(state.x))
        direction, estimate = method.server_step(total / n, state.estimate)
        x = state.x - self.plan.step_size(k) * direction
        if not bool(torch.isfinite(x).all()):
            raise Diverged(k, [], "x")
        if row is not None:
            self._record(row)
        if method.feedback:
            rows = method.idle_step(state.memory.clone())
            if messages is not None:
                rows[numbers] = method.remember(state.memory[numbers], messages)
            state.memory = rows
        state.x, state.estimate = x, estimate
        state.messages += len(taken)
        state.round += 1
        for node in taken:
            self.state.seats[node].accept(self._taken[node].digest, k)
        away = sorted(set(self._asked) - set(taken))
        if away:
            self.journal.note("away", round=k, parties=away)
        self._save()
        self._open_round()

    def finish(self) -> Run:
        """The last row, and what came out, as any run has it."""
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
            privacy=self.mechanism.spent() if self.mechanism is not None else None,
            stopped=stopped,
        )

    def close(self) -> None:
        self.storage.close()
        if self.mechanism is not None:
            self.mechanism.close()

    def _open_round(self) -> None:
        drawn = self.plan.participation.draw(len(self.parties), self.round, self.plan.seed)
        self._asked = self.parties if drawn is None else [self.parties[i] for i in drawn.tolist()]
        self._taken: dict[str, Reply] = {}
        self._refusals: dict[str, str] = {}
        self._greeting: set[str] = set()

    def _row(self, node: str) -> Array | None:
        """A party that lost its memory gets the server's; the others have their own."""
        if node not in self._greeting or not self.method.feedback or not self.state.seats[node].accepted:
            return None
        return self.state.run.memory[self.parties.index(node)].numpy().copy()

    def _refusal(self, node: str, seat: Seat, refusal: Refusal) -> Outcome:
        if refusal.reason == "state":
            if not refusal.token:
                return self._drop(node, seat, "a hello without a token")
            if refusal.token not in seat.tokens:
                seat.tokens.append(refusal.token)
                self._unsaved = True
                self._note("hello", node, life=len(seat.tokens))
            self._greeting.add(node)
            return "hello"
        if refusal.round != self.round or node in self._taken:
            return self._note("late", node, reason=refusal.reason)
        self._refusals[node] = refusal.reason
        return self._note("refused", node, reason=refusal.reason)

    def _note(self, event: Outcome, node: str, **facts: Any) -> Outcome:
        self.journal.note(event, round=self.round, party=node, **facts)
        return event

    def _drop(self, node: str, seat: Seat | None, why: str) -> Outcome:
        if seat is not None:
            seat.faults += 1
        return self._note("dropped", node, why=why)

    def _observed(self, taken: Mapping[str, Reply]) -> Row:
        row = observed(self.method, self.state.run, taken.values(), len(self.parties), noisy=self._local)
        evaluates = self.round % self.plan.evaluate_every == 0 or self.round == self.plan.rounds
        if self._evaluate is not None and evaluates:
            row |= self._evaluate(self.state.run.x)
        return row

    def _record(self, row: Row) -> None:
        if self.mechanism is not None:
            row["epsilon"] = self.mechanism.epsilon()
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
        tensors = {"x": state.x, "estimate": state.estimate}
        if self.method.feedback:
            tensors["memory"] = state.memory
        self.storage.save(self.round, tensors, facts)
        self._unsaved = False


def check_names(run: str, parties: Sequence[str]) -> None:
    """Names become folders and travel: letters, digits, dot, dash, underscore, each party once."""
    for name in (run, *parties):
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name for a run or party: letters, digits, '.', '-', '_', at most 64")
    if not parties or len(set(parties)) != len(parties):
        raise UsageError(f"a federation needs parties, each named once, got {len(parties)} with repetitions or none")
