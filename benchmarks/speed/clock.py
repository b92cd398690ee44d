"""When rounds end: start-up, warm-up, then the time of each round."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Told of the end of every round; says when enough rounds were seen.

    The first rounds are warm-up: a fifth of `rounds`, ten at most, and only one where that took `seconds`. Where rounds
    only queue work on a device, `wait` is called around blocks of `block` rounds, and a block counts as its mean.
    `report` is called now and then, for the case that the clock is never asked for its results.
    """

    def __init__(
        self,
        rounds: int,
        seconds: float,
        *,
        wait: Callable[[], object] = lambda: None,
        block: int = 1,
        report: Callable[[], object] = lambda: None,
    ) -> None:
        self.rounds, self.seconds = rounds, seconds
        self._wait, self._block, self._report = wait, min(block, rounds), report
        self._warm_up = self._cold = max(1, min(10, rounds // 5))
        self._began = self._last = time.perf_counter()
        self._reported = 0.0
        self._open = 0
        self.first: float | None = None  # wall-clock time at the end of the first round
        self.times: list[float] = []

    @property
    def most(self) -> int:
        """How many rounds a contestant may be asked for."""
        return self._warm_up + self.rounds

    def tick(self) -> bool:
        """A round has ended; True once there were enough."""
        self._open += 1
        if not self._cold and self._open < self._block:
            return False
        self._wait()
        now = time.perf_counter()
        if self._cold:
            return self._warmer(now)
        self.times += [(now - self._last) / self._open] * self._open
        self._last, self._open = now, 0
        if now - self._reported > 1:
            self._report()
            self._reported = self._last = time.perf_counter()
        return len(self.times) >= self.rounds or now - self._began >= self.seconds

    def _warmer(self, now: float) -> bool:
        if self.first is None:
            self.first = time.time()
        self._cold -= 1
        if now - self._began >= self.seconds:
            self._cold = 0
        if not self._cold:
            self._began = now
        self._last, self._open = now, 0
        return False


def drive(step: Callable[[], object], clock: Clock) -> None:
    """One round after the other, until the clock has seen enough."""
    step()
    while not clock.tick():
        step()
