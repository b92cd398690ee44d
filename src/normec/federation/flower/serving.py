"""The server's rounds over the network: ask those who are there, take what comes, close a round when it may close.

A round closes as soon as everyone who was asked and is still there has answered, and enough did; at its time limit with
those who answered, if they are enough; else the silent are asked again and the round goes on, until `wait_seconds`
have passed: then the run stops, and says so. Whoever comes back in the middle of a round is asked again at once.
Parties that misbehave, or are silent until the limit, are set aside (`conduct`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.coordinator import Coordinator
from .conduct import Conduct
from .mailbox import Letter, Mailbox
from .roster import Present, Roster

LOOK = 2.0  # seconds between two looks at who is there
ASKS = 4  # requests to one party in a round before it is set aside

Say = Callable[[str], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Patience:
    """`round`: seconds until a round closes without those who are silent. `wait`: seconds until a round is given up."""

    round: float
    wait: float


def serve(
    coordinator: Coordinator,
    mailbox: Mailbox,
    roster: Roster,
    patience: Patience,
    say: Say,
    clock: Clock = time.monotonic,
) -> None:
    """All rounds that are left."""
    conduct = Conduct()
    while not coordinator.finished:
        _Round(coordinator, mailbox, roster, conduct, patience, say, clock).run()


class _Round:
    def __init__(
        self,
        coordinator: Coordinator,
        mailbox: Mailbox,
        roster: Roster,
        conduct: Conduct,
        patience: Patience,
        say: Say,
        clock: Clock,
    ) -> None:
        self._coordinator, self._mailbox, self._roster, self._conduct = coordinator, mailbox, roster, conduct
        self._patience, self._say, self._clock = patience, say, clock
        self._asked: dict[str, str] = {}  # whom, and since when the party was there then
        self._since: dict[str, float] = {}  # when each was asked last
        self._silent: set[str] = set()
        self._present: dict[str, Present] = {}
        self._asks: Counter[str] = Counter()

    def run(self) -> None:
        coordinator, k = self._coordinator, self._coordinator.round
        began = self._clock()
        deadline, look = began + self._patience.round, began
        while coordinator.round == k and not coordinator.finished:
            now = self._clock()
            if now >= look:
                look = now + LOOK
                self._present = self._roster.present()
                self._ask(now)
            letter = self._mailbox.next(0.2)
            if letter is not None:
                self._take(letter, k)
                continue  # all that is there, before anything is decided
            if any(not self._conduct.aside(name, now) for name in coordinator.greeting - self._silent):
                self._ask(now)
            late = now > deadline
            if late:
                for name in sorted(self._silent & self._present.keys()):
                    self._set_aside(name, "it was silent until the round's time limit", now)
            if coordinator.ready and not any(map(self._conduct.trusted, self._silent & self._present.keys())):
                self._say(f"round {k}: {coordinator.answered} of {len(coordinator.parties)} parties")
                coordinator.close_round()
            elif self._hopeless():
                return
            elif now - began > self._patience.wait:
                coordinator.stop(
                    f"round {k}: {coordinator.answered} answers came within wait_seconds = {self._patience.wait:g}, "
                    f"{coordinator.minimum} are needed; start the missing parties, then the run again: it goes on"
                )
            elif late:
                self._say(f"round {k}: {coordinator.answered} answers, {coordinator.minimum} are needed; asking again")
                coordinator.repeat_round()
                self._asked.clear()
                self._asks.clear()
                deadline, look = now + self._patience.round, now

    def _ask(self, now: float) -> None:
        """Requests for all who are there, are not set aside, and were not asked since they came."""
        greeting = self._coordinator.greeting - self._silent
        due = {}
        for name, request in self._coordinator.requests().items():
            here = self._present.get(name)
            if here is None or self._conduct.aside(name, now):
                continue
            if name not in greeting and self._asked.get(name) == here.since:
                continue
            if self._asks[name] >= ASKS:
                self._set_aside(name, f"it was asked {ASKS} times in this round", now)
                continue
            self._asks[name] += 1
            self._asked[name], self._since[name] = here.since, now
            self._silent.add(name)
            due[here.node] = request
        self._mailbox.post(due, ttl=2 * self._patience.round + 60)

    def _take(self, letter: Letter, k: int) -> None:
        name, now = self._roster.name(letter.node), self._clock()
        if letter.lost:
            if letter.round == k:
                self._silent.discard(name)
                self._asked.pop(name, None)
            return
        if letter.fields is None:
            outcome = self._coordinator.fault(name, letter.fault)
        else:
            outcome = self._coordinator.receive(name, letter.fields)
        if letter.round == k or outcome == "taken":
            self._silent.discard(name)
        if outcome == "taken":
            self._conduct.clean(name)
        elif outcome == "dropped":
            self._set_aside(name, "its message was dropped", now)
        elif outcome == "hello" and self._conduct.hello(name):
            self._set_aside(name, "it says hello again and again", now)

    def _set_aside(self, name: str, why: str, now: float) -> None:
        """Neither ask nor wait for a party for a while; afterwards it is asked again."""
        seconds = self._conduct.strike(name, now - self._since.get(name, now), now)
        self._silent.discard(name)
        self._asked.pop(name, None)
        self._asks[name] = 0
        self._coordinator.note_aside(name, seconds, why)
        self._say(f"{name} is set aside for {seconds:.0f} s: {why}")

    def _hopeless(self) -> bool:
        """Too many have refused for the round ever to close: the run stops, and says why."""
        coordinator, refusals = self._coordinator, self._coordinator.refusals
        if coordinator.ready or len(coordinator.parties) - len(refusals) >= coordinator.minimum:
            return False
        reasons = ", ".join(f"{word}: {count}" for word, count in sorted(Counter(refusals.values()).items()))
        coordinator.stop(
            f"round {coordinator.round}: {len(refusals)} of {len(coordinator.parties)} parties refuse ({reasons}), "
            f"{coordinator.minimum} are needed"
        )
        return True
