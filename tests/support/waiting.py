"""Waiting for events: a file, a line, the end of a process. No test waits for a time and hopes for the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 1800.0  # seconds; only something that hangs reaches it, however slow or busy the machine is


def wait_for(
    condition: Callable[[], object], name: str, check: Callable[[], None] = lambda: None, every: float = 0.05
) -> None:
    """Return when `condition` holds; `check` fails early where it never will."""
    until = time.monotonic() + LIMIT
    while not condition():
        check()
        assert time.monotonic() < until, f"waited {LIMIT:g} s for {name}"
        time.sleep(every)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
