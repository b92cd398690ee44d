"""The ranks of a job as the operating system sees them, and waiting for what they do."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Callable
from os import close, pidfd_open
from pathlib import Path

HANG = 600.0  # seconds that only a hang takes


def wait_until(happened: Callable[[], bool]) -> None:
    """Until `happened()`; for what can be seen but not waited for."""
    deadline = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < deadline, "this does not happen"
        time.sleep(0.01)


def wait_for_end(process: int) -> None:
    """Until the process with this number is gone, if it is there at all."""
    try:
        handle = pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], HANG)[0], f"process {process} does not end"
    finally:
        close(handle)


def wait_for_history(folder: Path, process: subprocess.Popen[str], more: int = 1) -> None:
    """Until the run in `folder` has written `more` bytes of history."""
    metrics = folder / "metrics.jsonl"

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    before = size()

    def written() -> bool:
        assert process.poll() is None, process.communicate()[1][-2000:]
        return size() >= before + more

    wait_until(written)


def ranks_of(parent: int) -> dict[int, int]:
    """Rank → process number, of the living processes below `parent`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parts = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if parts else 0
        except (OSError, ValueError):
            continue
        rank = next((part[5:] for part in parts if part.startswith(b"RANK=")), None)
        if rank is not None and above == parent:
            found[int(rank)] = int(entry.name)
    return found
