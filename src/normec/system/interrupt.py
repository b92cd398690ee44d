"""Ctrl-C as a request: the first is noted and honoured after the current round, the second is immediate."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupt:
    """While entered, in the main thread, SIGINT sets `asked` instead of raising."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
