"""Timing of rounds: start-up, warm-up, then the time of each round."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Times rounds, after a warm-up of a fifth of `rounds`, at most ten.

    The warm-up ends with the first of its rounds that is over `warm_up` seconds after the first one.

    Args:
        rounds: Maximal number of timed rounds.
        seconds: Maximal time for them.
        wait: Waits for the device, on which rounds only queue work.
        block: Rounds between two calls of `wait`, fewer if they take long; each counts with the mean of the block.
        report: Called about once per second, so that results are not lost if the process is stopped.
        begin: Called after the warm-up, and returns when rounds may be timed.
        end: Called after the last timed round.
        warm_up: Maximal time for the warm-up, without its first round (default: `seconds`).
    """

    def __init__(
        self,
        rounds: int,
        seconds: float,
        *,
        wait: Callable[[], object] = lambda: None,
        block: int = 1,
        report: Callable[[], object] = lambda: None,
        begin: Callable[[], object] = lambda: None,
        end: Callable[[], object] = lambda: None,
        warm_up: float | None = None,
    ) -> None:
        self.rounds, self.seconds = rounds, seconds
        self._wait, self._block, self._report = wait, min(block, rounds), report
        self._begin, self._end = begin, end
        self._warm_up = self._warm_up_left = max(1, min(10, rounds // 5))
        self._settle = seconds if warm_up is None else warm_up
        self._began = self._last = time.perf_counter()
        self._reported = 0.0
        self._open = 0
        self.first_round_end: float | None = None  # wall-clock time at the end of the first round
        self.times: list[float] = []

    @property
    def max_rounds(self) -> int:
        """The number of rounds to run, with the warm-up."""
        return self._warm_up + self.rounds

    def tick(self) -> bool:
        """Record the end of a round; returns whether enough rounds were timed."""
        self._open += 1
        if not self._warm_up_left and self._open < self._block:
            return False
        self._wait()
        now = time.perf_counter()
        if self._warm_up_left:
            return self._end_of_warm_up_round(now)
        self.times += [(now - self._last) / self._open] * self._open
        self._last, self._open = now, 0
        if now - self._reported > 1:
            self._report()
            self._reported = self._last = time.perf_counter()
        if len(self.times) < self.rounds and now - self._began < self.seconds:
            return False
        self._end()
        return True

    def _end_of_warm_up_round(self, now: float) -> bool:
        if self.first_round_end is None:
            self.first_round_end, self._began = time.time(), now
        elif now - self._began >= self._settle:
            self._warm_up_left = 1
        self._warm_up_left -= 1
        if not self._warm_up_left:
            if self._block * (now - self._last) > self.seconds / 4:
                self._block = 1
            self._begin()
            self._began = now = time.perf_counter()
        self._last, self._open = now, 0
        return False


def run_rounds(step: Callable[[], object], clock: Clock) -> None:
    """Run rounds until the clock has timed enough of them."""
    step()
    while not clock.tick():
        step()
