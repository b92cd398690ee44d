"""The time that the parts of a run take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch.profiler import record_function

Item = TypeVar("Item")
PARTS = ("gradients", "update", "communication", "evaluation", "checkpoint", "total")
SPAN = "normec: "  # how the names of spans in a trace begin
_NOTHING = nullcontext()


class _Timed:
    """Adds the time within to `seconds[part]`; a generator with `contextmanager` would take several times as long."""

    def __init__(self, seconds: dict[str, float], part: str, span: AbstractContextManager[Any]) -> None:
        self._seconds, self._part, self._span = seconds, part, span

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._span.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._span.__exit__(*error)
        if error[0] is None:
            self._seconds[self._part] += time.perf_counter() - self._start


class Stopwatch:
    """Seconds per part; "total" is the time of the run, including the time before it was resumed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.spans = False  # whether parts have names in the trace of a profiler

    def timed(self, part: str) -> AbstractContextManager[Any]:
        """Count the time within as `part`, and name it in the trace."""
        return _Timed(self.seconds, part, self.span(part))

    def span(self, part: str) -> AbstractContextManager[Any]:
        """Name a part of a round in the trace; does nothing while no profile is made."""
        return record_function(SPAN + part) if self.spans else _NOTHING

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
