"""The time that the parts of a run take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch.profiler import record_function

Item = TypeVar("Item")
PARTS = ("gradients", "update", "communication", "evaluation", "checkpoint", "total")
SPAN = "normec: "  # how the names of spans in a trace begin


class Stopwatch:
    """Seconds per part; "total" is the time of the run, including the time before it was resumed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.spans = False  # whether parts have names in the trace of a profiler

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.span(part):
            yield
        self.seconds[part] += time.perf_counter() - start

    def span(self, part: str) -> AbstractContextManager[Any]:
        """Name a part of a round in the trace; does nothing while no profile is made."""
        return record_function(SPAN + part) if self.spans else nullcontext()

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
