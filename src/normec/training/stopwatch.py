"""The time that the parts of a run take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
PARTS = ("gradients", "update", "communication", "evaluation", "checkpoint", "total")


class Stopwatch:
    """Seconds per part; "total" is the time of the run, including the time before it was resumed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and count the time that it takes to get them as `part`."""
        source = iter(items)
        while True:
            with self.timed(part):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    def start(self) -> None:
        self._before, self._started = self.seconds["total"], time.monotonic()

    def stop(self) -> None:
        """Update "total"."""
        self.seconds["total"] = self._before + time.monotonic() - self._started
