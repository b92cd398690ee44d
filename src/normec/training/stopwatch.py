"""Where a run's seconds go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
PARTS = ("gradients", "update", "communication", "evaluation", "checkpoint", "total")


class Stopwatch:
    """Seconds by part; "total" is the run's, over all its processes' lives."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the time it takes to get them is the part's."""
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
        """Bring "total" up to now."""
        self.seconds["total"] = self._before + time.monotonic() - self._started
