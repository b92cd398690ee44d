"""Suspensions: a party that misbehaves, or delays a round, is neither asked nor waited for during some time.

The time doubles with every further fault, and it is never shorter than the delay that the party caused. Afterwards the
party is asked again, but rounds that have enough answers do not wait for it until it has sent `CLEAN` valid messages in
a row. This number doubles after each further suspension, up to `CLEAN` · 2^`DOUBLINGS`. So a party delays the others
rarely and ever more rarely, and rounds soon wait again for a party that made a single mistake. A valid message counts
at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 5.0  # seconds
DOUBLINGS = 6  # at most 64 times the delay, and 64 times as many valid messages
HANDSHAKES = 2  # without a message in between; an honest party needs two if it is killed before its message
CLEAN = 8  # valid messages in a row after which rounds wait for a party again


@dataclass
class _Record:
    """`strikes` counts the faults since rounds last waited for the party, and `ever` all of them."""

    strikes: int = 0
    ever: int = 0
    clean: int = 0
    handshakes: int = 0
    until: float = 0.0


class Suspensions:
    """The suspensions of all parties, by name. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def strike(self, name: str, held: float, now: float) -> float:
        """Suspend a party for a fault, or for a delay of `held` seconds. Returns the seconds of the suspension."""
        record = self._records.setdefault(name, _Record())
        seconds = max(SHORTEST, held) * 2.0 ** min(record.strikes, DOUBLINGS)
        record.strikes, record.ever, record.clean, record.until = record.strikes + 1, record.ever + 1, 0, now + seconds
        return seconds

    def handshake(self, name: str) -> bool:
        """Count a handshake. Returns whether there were too many."""
        record = self._records.setdefault(name, _Record())
        record.handshakes += 1
        return record.handshakes > HANDSHAKES

    def clean(self, name: str) -> None:
        """Count a valid message."""
        record = self._records.setdefault(name, _Record())
        record.clean, record.handshakes = record.clean + 1, 0
        if record.clean >= CLEAN * 2 ** min(max(0, record.ever - 1), DOUBLINGS):
            record.strikes = 0

    def trusted(self, name: str) -> bool:
        """Whether a round waits for the party."""
        record = self._records.get(name)
        return record is None or record.strikes == 0

    def suspended(self, name: str, now: float) -> bool:
        """Whether the party is not asked at present."""
        record = self._records.get(name)
        return record is not None and now < record.until
