"""The replies of the open round: each is taken once, recognised when it is repeated, and dropped if it is invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...errors import WireError
from .journal import Journal
from .screening import Limits, screened
from .server_state import PartyRecord
from .wire import Array, Refusal, Reply, from_fields

Outcome = Literal["taken", "duplicate", "dropped", "refused", "handshake", "late"]


class Collector:
    """Collects the replies and refusals of the open round.

    `taken` holds the valid replies, `refusals` the reasons of the parties that refused, and `joining` the parties that
    started a handshake and wait for an answer. `unsaved` is true while handshakes or drops are in no checkpoint.
    Messages beyond `limits` are dropped; `own_limits` are those of parties with a noise of their own.
    """

    def __init__(
        self,
        run: str,
        parties: dict[str, PartyRecord],
        limits: Limits,
        journal: Journal,
        own_limits: Mapping[str, Limits],
    ) -> None:
        self._run, self._parties, self._journal = run, parties, journal
        self.limits, self._own_limits = limits, own_limits
        self.unsaved = False
        self.open(0, [])

    def open(self, round: int, asked: Sequence[str]) -> None:
        """Begin a new round."""
        self._round, self.asked = round, asked
        self.taken: dict[str, Reply] = {}
        self.refusals: dict[str, str] = {}
        self.joining: set[str] = set()

    @property
    def waiting(self) -> set[str]:
        return set(self.asked) - self.taken.keys() - self.refusals.keys()

    def receive(
        self, node: str, given: Mapping[str, Any] | Reply | Refusal, like: np.ndarray[Any, Any], row: Array | None
    ) -> Outcome:
        """Process a message from `node`.

        The message must have the shape and dtype of `like`. `row` is the party's memory as the server follows it; None
        if no message was accepted yet, or if the method has no memory.
        """
        party = self._parties.get(node)
        if party is None:
            return self.fault(node, "it comes from no party of this federation")
        try:
            message = given if isinstance(given, Reply | Refusal) else from_fields(given, len(like))
        except WireError as error:
            return self.fault(node, str(error))
        if not isinstance(message, Reply | Refusal):
            return self.fault(node, "it is neither a reply nor a refusal")
        if message.run != self._run or message.node != node:
            return self.fault(node, "it names another run or party")
        if message.round > self._round:
            return self.fault(node, f"it answers round {message.round}, which has not begun")
        if isinstance(message, Refusal):
            return self._refusal(node, party, message)
        return self._reply(node, party, message, like, row)

    def _reply(
        self, node: str, party: PartyRecord, reply: Reply, like: np.ndarray[Any, Any], row: Array | None
    ) -> Outcome:
        if node in self.taken:
            if reply.digest == self.taken[node].digest:
                return self._note("duplicate", node, step=reply.step)
            return self.fault(node, "it differs from the message already taken in this round")
        if reply.step <= party.accepted:
            return self._note("duplicate", node, step=reply.step)
        fault = screened(reply, party, like, row, self._own_limits.get(node, self.limits))
        if fault is not None:
            if fault.known and party.dropped != reply.digest:
                party.dropped, party.drops, self.unsaved = reply.digest, party.drops + 1, True
            return self.fault(node, fault.reason)
        if reply.round != self._round:
            self._note("late", node, step=reply.step, computed=reply.round)
        self.taken[node] = reply
        self.refusals.pop(node, None)
        self.joining.discard(node)
        return "taken"

    def _refusal(self, node: str, party: PartyRecord, refusal: Refusal) -> Outcome:
        if refusal.reason == "state":
            if not refusal.token:
                return self.fault(node, "a handshake without a token")
            if refusal.token not in party.tokens:
                self.unsaved = True
                self._note("handshake", node, count=party.handshakes + 1)
            party.note_handshake(refusal.token)
            self.joining.add(node)
            return "handshake"
        if refusal.round != self._round or node in self.taken:
            return self._note("late", node, reason=refusal.reason)
        self.refusals[node] = refusal.reason
        return self._note("refused", node, reason=refusal.reason)

    def _note(self, event: Outcome, node: str, **facts: Any) -> Outcome:
        self._journal.note(event, round=self._round, party=node, **facts)
        return event

    def fault(self, node: str, why: str) -> Outcome:
        """Count an invalid message and note its fault in the journal."""
        party = self._parties.get(node)
        if party is not None:
            party.faults += 1
        return self._note("dropped", node if party is not None else "?", why=why)
