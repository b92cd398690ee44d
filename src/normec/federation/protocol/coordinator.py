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
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...algorithms.method import MEMORY, Tables
from ...errors import BudgetSpent, UsageError
from ...privacy.display import shown_epsilon
from ...privacy.mechanism import Mechanism, Spent
from ...sampling.participation import drawn_clients
from ...training.run import State
from .collector import Collector, Outcome
from .federated_run import FederatedRun, writes
from .method_checks import public_vector, restorable
from .screening import Limits
from .server_mechanism import noise_ratios
from .wire import Array, Refusal, Reply, Request


class Coordinator(FederatedRun):
    """A federated run in which the server receives the message of each party.

    Where records are clipped, the noise of each party is proportional to what one of its own records can change.
    """

    def _prepare(self) -> None:
        privacy = self.mechanism.privacy if self.mechanism is not None else None
        if privacy is not None and privacy.trust == "secure-sum":
            raise UsageError("with trust='secure-sum' the server sees no single message; use SumCoordinator")
        if not restorable(self._steps):
            logging.getLogger("normec").warning(
                "%s does not define follow: a party that loses its disk cannot come back to the run", self.method.name
            )
        self._local = privacy is not None and privacy.trust == "local"
        ratios = noise_ratios(self.mechanism, self.method, self._plans, self._dimension)
        self._ratios = dict(zip(self.parties, ratios, strict=True))
        self._plan_of = dict(zip(self.parties, self._plans, strict=True))

    def _attach(self) -> None:
        largest, length = max(self._sigmas) if self._local else 0.0, self.message_length
        limits, ratios = Limits.of(self.method, largest, length), self._ratios
        own = {node: Limits.of(self.method, largest * ratio, length) for node, ratio in ratios.items() if ratio < 1}
        self.collector = Collector(self.run, self.state.parties, limits, self.journal, own)

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

    @writes
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
                plan=self._plan_of[node],
                record=self.state.parties[node].to_wire(self._row_to_restore(node)),
                public=public,
            )
            for node in self.collector.asked
            if node in self.waiting
        }

    @writes
    def receive(self, node: str, given: Mapping[str, Any] | Reply | Refusal) -> Outcome:
        """Process a message from `node`. An invalid one is noted in the journal with its fault and never reaches x."""
        like = self.state.run.x.new_empty(self.message_length).numpy()
        return self.collector.receive(node, given, like, self._row(node))

    @writes
    def fault(self, node: str, why: str) -> Outcome:
        """Note that `node` sent something that cannot be read as a message."""
        return self.collector.fault(node, why)

    @writes
    def repeat_round(self) -> None:
        """Ask the parties that refused once more, in a round with too few answers."""
        refused = len(self.collector.refusals)
        self.journal.note("repeated", round=self.round, answered=len(self.collector.taken), refused=refused)
        self.collector.refusals.clear()

    @writes
    def close_round(self) -> None:
        """Take the server's step with the messages of this round. It counts once the checkpoint is written."""
        k, taken, state = self.round, self.collector.taken, self.state.run
        if not self.ready:
            raise UsageError(f"round {k} has {len(taken)} answers and needs {self.needed}; wait for more or ask again")
        row = self._observed(taken.values(), noisy=self._local) if self.plan.adds_row(k) else None
        numbers = [i for i, node in enumerate(self.parties) if node in taken]
        messages = state.x.new_zeros(len(numbers), self.message_length)
        for own, i in zip(messages, numbers, strict=True):
            own.copy_(torch.tensor(taken[self.parties[i]].message))
        total = self._sum(messages, numbers)
        if total is None:
            return
        moved, server = self._moved(total, numbers)
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
            f"messages dropped: epsilon is {shown_epsilon(epsilon)}"
        )
        facts: dict[str, Any] = {"epsilon": epsilon, "releases": most, "beyond_ledger": most - spent.releases}
        if epsilon > target:
            note += f", above the target of {target:g}"
            reached = self.mechanism.privacy.covering(epsilon)
            facts |= {"is_target": False, "statement": reached.promise(len(self.parties))}
        return dataclasses.replace(spent, **facts, notes=(*spent.notes, note))

    def _move(self, moved: State, server: Tables, messages: Tensor, numbers: list[int]) -> None:
        """Make the state of the next round. Rows of parties that did not answer change as those of absent clients."""
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

    def _open_round(self) -> None:
        drawn = drawn_clients(self.plan.participation, len(self.parties), self.round, self.plan.seed)
        self.collector.open(self.round, self.parties if drawn is None else [self.parties[i] for i in drawn.tolist()])

    def _row(self, node: str) -> Array | None:
        """The party's memory as the server follows it; None without accepted messages, or if the server has no rows."""
        party = self.state.parties.get(node)
        if party is None or not party.accepted or not self.state.run.clients:
            return None
        row: Array = self.state.run.memory[self.parties.index(node)].numpy()
        return row

    def _row_to_restore(self, node: str) -> Array | None:
        """The row for a party that lost its memory; None for a party that has its own."""
        row = self._row(node) if node in self.collector.joining else None
        return row.copy() if row is not None else None

    def _save(self) -> None:
        super()._save()
        self.collector.unsaved = False
