"""Who is online, and how long a server waits: what the loops of all kinds of rounds share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .roster import OnlineParty, Roster

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

    def __init__(self, roster: Roster) -> None:
        self.roster, self.online, self._next = roster, dict[str, OnlineParty](), -math.inf

    def look(self, now: float) -> bool:
        """Look again if it is time to. Returns whether it was."""
        if now < self._next:
            return False
        self.online, self._next = self.roster.online(), now + LOOK
        return True
