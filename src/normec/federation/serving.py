"""The server's rounds over the network: ask those who are there, take what comes, close a round when it may close.

A round closes as soon as everyone who is there has answered, and enough did; at its time limit with those who
answered, if they are enough; else the silent are asked again and the round goes on. Whoever comes back in the middle
of a round is asked again at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from .coordinator import Coordinator
from .mailbox import Letter, Mailbox
from .roster import Present, Roster

LOOK = 2.0  # seconds between two looks at who is there
AGAIN = 5.0  # seconds before a party is asked again that answered with something unreadable, and is needed

Say = Callable[[str], None]


def serve(coordinator: Coordinator, mailbox: Mailbox, roster: Roster, round_seconds: float, say: Say) -> None:
    """All rounds that are left."""
    while not coordinator.finished:
        _Round(coordinator, mailbox, roster, round_seconds, say).run()


class _Round:
    def __init__(
        self, coordinator: Coordinator, mailbox: Mailbox, roster: Roster, round_seconds: float, say: Say
    ) -> None:
        self._coordinator, self._mailbox, self._roster = coordinator, mailbox, roster
        self._limit, self._say = round_seconds, say
        self._asked: dict[str, str] = {}  # whom, and since when the party was there then
        self._silent: set[str] = set()
        self._again: dict[str, float] = {}
        self._present: dict[str, Present] = {}

    def run(self) -> None:
        coordinator, k = self._coordinator, self._coordinator.round
        deadline, look = time.monotonic() + self._limit, 0.0
        while coordinator.round == k and not coordinator.finished:
            now = time.monotonic()
            if now >= look:
                look = now + LOOK
                self._present = self._roster.present()
                self._ask(now)
            letter = self._mailbox.next(0.2)
            if letter is not None:
                self._take(letter, k)
                continue  # all that is there, before anything is decided
            if coordinator.greeting - self._silent:
                self._ask(now)
            late = now > deadline
            if coordinator.ready and (late or not self._silent & self._present.keys()):
                self._say(f"round {k}: {coordinator.answered} of {len(coordinator.parties)} parties")
                coordinator.close_round()
            elif self._hopeless():
                return
            elif late:
                self._say(f"round {k}: {coordinator.answered} answers, {coordinator.minimum} are needed; asking again")
                coordinator.repeat_round()
                self._asked.clear()
                deadline, look = now + self._limit, 0.0

    def _ask(self, now: float) -> None:
        """Requests for all who are there and were not asked since they came."""
        for name in [name for name, due in self._again.items() if now >= due and not self._coordinator.ready]:
            del self._again[name]
            self._asked.pop(name, None)
        greeting = self._coordinator.greeting - self._silent
        due = {}
        for name, request in self._coordinator.requests().items():
            here = self._present.get(name)
            if here is not None and (name in greeting or self._asked.get(name) != here.since):
                self._asked[name] = here.since
                self._silent.add(name)
                due[here.node] = request
        self._mailbox.post(due, ttl=2 * self._limit + 60)

    def _take(self, letter: Letter, k: int) -> None:
        name = self._roster.name(letter.node)
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
        if outcome == "dropped":
            self._again[name] = time.monotonic() + AGAIN

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
