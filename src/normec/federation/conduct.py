"""Which parties a round asks and waits for: one that misbehaves, or holds rounds up, is set aside for a while.

Every time it happens again the while doubles, and it is never shorter than the time that the party held the round up.
So over many rounds a party costs the others a vanishing part of their time, and one that made a single mistake is soon
asked again. What it sends while it is set aside counts as always.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 5.0  # seconds
DOUBLINGS = 6  # at the most: sixty-four times as long as the party held the round up
CLEAN = 8  # messages in a row, without a fault between them, after which all is forgotten


@dataclass
class _Book:
    strikes: int = 0
    clean: int = 0
    until: float = 0.0


class Conduct:
    """The parties' conduct by name. Times are seconds of any clock that only goes forward."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def strike(self, name: str, held: float, now: float) -> float:
        """A fault, or a round held up for `held` seconds. Returns for how many seconds the party is set aside."""
        book = self._books.setdefault(name, _Book())
        seconds = max(SHORTEST, held) * 2.0 ** min(book.strikes, DOUBLINGS)
        book.strikes, book.clean, book.until = book.strikes + 1, 0, now + seconds
        return seconds

    def clean(self, name: str) -> None:
        """A message that was taken in the round that it was asked for in."""
        book = self._books.setdefault(name, _Book())
        book.clean += 1
        if book.clean >= CLEAN:
            book.strikes = 0

    def aside(self, name: str, now: float) -> bool:
        book = self._books.get(name)
        return book is not None and now < book.until
