"""The parties that are online, and the time limits of a server; the loops over rounds and over exchanges use both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .run_parties import OnlineParty, RunParties

LOOK = 2.0  # seconds between two queries of the parties that are online
WAIT = 0.2  # seconds to wait for an answer before the time limits are checked

Say = Callable[[str], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timeouts:
    """`round` is the time in seconds until a round closes without silent parties, `wait` until the run gives up."""

    round: float
    wait: float


class Presence:
    """The parties that are online, as they were at the last look."""

    def __init__(self, parties: RunParties) -> None:
        self.parties, self.online, self._next = parties, dict[str, OnlineParty](), -math.inf

    def look(self, now: float) -> bool:
        """Ask who is online, if the last look was `LOOK` seconds ago. Returns whether it asked."""
        if now < self._next:
            return False
        self.online, self._next = self.parties.online(), now + LOOK
        return True
