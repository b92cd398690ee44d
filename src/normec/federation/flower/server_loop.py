"""The rounds of the server over the network: ask the parties that are online, receive answers, and close rounds.

A round closes as soon as every party that was asked and is still online has answered, if there are enough answers. At
the time limit it closes with the answers that there are, if they are enough. Otherwise the silent parties are asked
again and the round continues, until `wait_seconds` have passed; then the run stops with a reason. A party that comes
back during a round is asked again at once. Parties that misbehave, or are silent until the limit, are suspended
(`suspension`).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from .correspondence import Correspondence
from .mailbox import Incoming, Mailbox
from .presence import WAIT, Clock, Presence, Say, Timeouts
from .run_parties import RunParties
from .suspension import Suspensions

if TYPE_CHECKING:
    from ..protocol.coordinator import Coordinator

ASKS = 4  # requests to one party in a round before it is suspended


def run_rounds(
    coordinator: Coordinator,
    mailbox: Mailbox,
    parties: RunParties,
    timeouts: Timeouts,
    say: Say,
    clock: Clock = time.monotonic,
) -> None:
    """Run all remaining rounds."""
    suspensions, presence = Suspensions(), Presence(parties)
    while not coordinator.finished:
        _Round(coordinator, mailbox, presence, suspensions, timeouts, say, clock).run()


class _Round(Correspondence):
    def __init__(
        self,
        coordinator: Coordinator,
        mailbox: Mailbox,
        presence: Presence,
        suspensions: Suspensions,
        timeouts: Timeouts,
        say: Say,
        clock: Clock,
    ) -> None:
        super().__init__(coordinator, mailbox, presence, suspensions, timeouts, say, clock)
        self._coordinator = coordinator
        self._asks: Counter[str] = Counter()

    def run(self) -> None:
        coordinator, k = self._coordinator, self._coordinator.round
        began = self._clock()
        deadline, again, taken = began + self._timeouts.round, True, False
        while coordinator.round == k and not coordinator.finished:
            now = self._clock()
            if self._presence.look(now) or again:
                again = False
                self._ask(now)
            incoming = self._mailbox.next(0.0 if taken else WAIT)
            taken = incoming is not None
            if incoming is not None:
                self._take(incoming, k)
                continue  # process all answers that are there before anything is decided
            if any(not self._suspensions.suspended(name, now) for name in coordinator.joining - self._silent):
                self._ask(now)
            late = now > deadline
            if late:
                self._suspend_silent("the round", now)
            if coordinator.ready and not self._waits():
                self._say(f"round {k}: {coordinator.answered} of {len(coordinator.parties)} parties")
                coordinator.close_round()
            elif self._hopeless():
                return
            elif now - began > self._timeouts.wait:
                coordinator.stop(
                    f"round {k}: {coordinator.answered} answers came within wait_seconds = {self._timeouts.wait:g}, "
                    f"{coordinator.minimum} are needed; start the missing parties, then start the run again to continue"
                )
            elif late:
                self._say(f"round {k}: {coordinator.answered} answers, {coordinator.minimum} are needed; asking again")
                coordinator.repeat_round()
                self._asked.clear()
                self._asks.clear()
                deadline, again = now + self._timeouts.round, True

    def _ask(self, now: float) -> None:
        """Send requests to all parties that are online, not suspended, and were not asked since they came online."""
        joining = self._coordinator.joining - self._silent
        due = {}
        for name, request in self._coordinator.requests().items():
            here = self._presence.online.get(name)
            if here is None or self._suspensions.suspended(name, now):
                continue
            if name not in joining and self._asked.get(name) == here.since:
                continue
            if self._asks[name] >= ASKS:
                self._suspend(name, f"it was asked {ASKS} times in this round", now)
                continue
            self._asks[name] += 1
            self._asked[name], self._since[name] = here.since, now
            self._silent.add(name)
            due[here.node] = request
        self._mailbox.post(due, ttl=2 * self._timeouts.round + 60)

    def _take(self, incoming: Incoming, number: int) -> str:
        outcome = super()._take(incoming, number)
        name = self._presence.parties.name(incoming.node)
        if outcome == "taken":  # also of an earlier round
            self._silent.discard(name)
        elif outcome == "handshake" and self._suspensions.handshake(name):
            self._suspend(name, "it starts one handshake after another", self._clock())
        return outcome

    def _suspend(self, name: str, why: str, now: float) -> None:
        super()._suspend(name, why, now)
        self._asks[name] = 0

    def _hopeless(self) -> bool:
        """Stop the run if so many parties have refused that the round can never close. Returns whether it stopped."""
        coordinator, refusals = self._coordinator, self._coordinator.refusals
        if coordinator.ready or len(coordinator.parties) - len(refusals) >= coordinator.minimum:
            return False
        coordinator.stop(f"{self._refused()}, {coordinator.minimum} are needed")
        return True
