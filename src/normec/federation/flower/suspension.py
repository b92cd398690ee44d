"""Which parties a round asks and waits for: one that misbehaves, or holds a round up, is set aside for a while.

Every time it happens again the while doubles, and it is never shorter than the time that the party held the round up.
Afterwards the party is asked again, but rounds that have enough answers do not wait for it until it has sent `CLEAN`
good messages in a row, and twice as many after each further time, up to `CLEAN` · 2^`DOUBLINGS`. So a party holds the
others up seldom and ever more seldom, and one that made a single mistake is soon waited for again. What it sends
counts at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 5.0  # seconds
DOUBLINGS = 6  # at the most: 64 times as long as the party held the round up, 64 times as many good messages
HANDSHAKES = (
    2  # without a message between them; an honest party says hello once, and again if it dies before its message
)
CLEAN = 8  # messages in a row, without a fault between them, after which a party is waited for again


@dataclass
class _Book:
    """`strikes`: since the party was last waited for; `ever`: all of them."""

    strikes: int = 0
    ever: int = 0
    clean: int = 0
    handshakes: int = 0
    until: float = 0.0


class Suspensions:
    """The parties' suspensions by name. Times are seconds of any clock that only goes forward."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def strike(self, name: str, held: float, now: float) -> float:
        """A fault, or a round held up for `held` seconds. Returns for how many seconds the party is set aside."""
        book = self._books.setdefault(name, _Book())
        seconds = max(SHORTEST, held) * 2.0 ** min(book.strikes, DOUBLINGS)
        book.strikes, book.ever, book.clean, book.until = book.strikes + 1, book.ever + 1, 0, now + seconds
        return seconds

    def handshake(self, name: str) -> bool:
        """A hello. Returns whether it is one too many."""
        book = self._books.setdefault(name, _Book())
        book.handshakes += 1
        return book.handshakes > HANDSHAKES

    def clean(self, name: str) -> None:
        """A message that was taken."""
        book = self._books.setdefault(name, _Book())
        book.clean, book.handshakes = book.clean + 1, 0
        if book.clean >= CLEAN * 2 ** min(max(0, book.ever - 1), DOUBLINGS):
            book.strikes = 0

    def trusted(self, name: str) -> bool:
        """Whether a round waits for the party."""
        book = self._books.get(name)
        return book is None or book.strikes == 0

    def suspended(self, name: str, now: float) -> bool:
        """Whether the party is not even asked."""
        book = self._books.get(name)
        return book is not None and now < book.until
