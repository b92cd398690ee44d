"""The state of the parties during a round or an exchange: who was asked, and who is silent or suspended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from .mailbox import Incoming, Mailbox
from .presence import Clock, Presence, Say, Timeouts
from .suspension import Suspensions


class Answered(Protocol):
    """The side of a coordinator that takes the answers of parties."""

    @property
    def round(self) -> int: ...
    @property
    def parties(self) -> Collection[str]: ...
    @property
    def refusals(self) -> Mapping[str, str]: ...
    def receive(self, node: str, given: Mapping[str, Any]) -> str: ...
    def fault(self, node: str, why: str) -> str: ...
    def note_suspension(self, node: str, seconds: float, why: str) -> None: ...


class Correspondence:
    """Takes answers for a coordinator, and suspends parties that misbehave or are silent."""

    def __init__(
        self,
        answered: Answered,
        mailbox: Mailbox,
        presence: Presence,
        suspensions: Suspensions,
        timeouts: Timeouts,
        say: Say,
        clock: Clock,
    ) -> None:
        self._answered, self._mailbox, self._presence = answered, mailbox, presence
        self._suspensions, self._timeouts, self._say, self._clock = suspensions, timeouts, say, clock
        self._asked: dict[str, str] = {}  # the parties that were asked, and since when they were online
        self._since: dict[str, float] = {}  # when each party was last asked
        self._silent: set[str] = set()

    def _waits(self) -> bool:
        """Whether an answer of a party that is online and trusted is missing."""
        return any(map(self._suspensions.trusted, self._silent & self._presence.online.keys()))

    def _take(self, incoming: Incoming, number: int) -> str:
        """Pass an answer to the coordinator and return its outcome; `number` is that of the round or exchange."""
        name = self._presence.parties.name(incoming.node)
        if incoming.lost:
            if incoming.round == number:
                self._silent.discard(name)
                self._asked.pop(name, None)
            return "lost"
        if incoming.fields is None:
            outcome = self._answered.fault(name, incoming.fault)
        else:
            outcome = self._answered.receive(name, incoming.fields)
        if incoming.round == number:
            self._silent.discard(name)
        if outcome == "taken":
            self._suspensions.clean(name)
        elif outcome == "dropped":
            self._suspend(name, "its message was dropped", self._clock())
        return outcome

    def _suspend(self, name: str, why: str, now: float) -> None:
        """Suspend a party: it is neither asked nor waited for during some time, and asked again afterwards."""
        seconds = self._suspensions.strike(name, now - self._since.get(name, now), now)
        self._silent.discard(name)
        self._asked.pop(name, None)
        self._answered.note_suspension(name, seconds, why)
        self._say(f"{name} is suspended for {seconds:.0f} s: {why}")

    def _suspend_silent(self, limit: str, now: float) -> None:
        """Suspend all parties that are online and silent at the time limit of `limit`."""
        for name in sorted(self._silent & self._presence.online.keys()):
            self._suspend(name, f"it was silent until the time limit of {limit}", now)

    def _refused(self) -> str:
        """How many parties refuse the round, and for which reasons."""
        answered, counts = self._answered, Counter(self._answered.refusals.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
        return f"round {answered.round}: {counts.total()} of {len(answered.parties)} parties refuse ({reasons})"
