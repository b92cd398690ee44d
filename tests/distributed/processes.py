"""Jobs and their ranks as processes of the operating system: waiting for what they do, and their sockets."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
from multiprocessing.connection import wait
from os import close, pidfd_open
from pathlib import Path

from ..support.forks import Fork
from ..support.waiting import LIMIT, wait_for


def wait_for_end(process: int) -> None:
    """Wait until the process with this number is gone, if it is there at all."""
    try:
        handle = pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert wait([handle], LIMIT), f"process {process} does not end"
    finally:
        close(handle)


def ranks_of(parent: int) -> dict[int, int]:
    """Rank → process number, of the living processes below `parent`.

    A forked rank has its number in its name, and one that was started from nothing in its environment.
    """
    found: dict[int, int] = {}
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:  # it has ended
        return found
    for child in children:
        try:
            named = re.match(r"rank (\d+)$", Path(f"/proc/{child}/comm").read_text())
            parts = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = named[1] if named else next((part[5:] for part in parts if part.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank)] = int(child)
    return found


def listening() -> list[tuple[str, int, str]]:
    """Address, port and inode of every TCP socket of this machine that is listened on, as the kernel writes them."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                address, port = local.split(":")
                found.append((address, int(port, 16), rest[5]))
    return found


class Job:
    """A command that starts ranks and trains in the folder `run`; its lines on stderr are heard as they come."""

    def __init__(self, process: Fork | subprocess.Popen[str], cwd: Path) -> None:
        self.process = process
        self.run = cwd / "run"
        self.errors: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def of_normec(cls, *arguments: str, cwd: Path) -> Job:
        return cls(Fork(["-m", "normec", *arguments, "--out", "run"], cwd), cwd)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def _line(self) -> str | None:
        """Wait for the next line, and return it; None at the end."""
        line = self._lines.get(timeout=LIMIT)
        if line is not None:
            self.errors.append(line)
        return line

    def blamed(self) -> int | None:
        """Wait until the launcher says which rank was killed, and return it; None if the job ends before."""
        while (line := self._line()) is not None:
            found = re.match(r"rank (\d+) was killed by SIGKILL; restarting all ranks", line)
            if found:
                return int(found[1])
        return None

    def ended(self) -> int:
        """Wait for the end of the job, and return its exit code."""
        while self._line() is not None:
            pass
        return self.process.wait(LIMIT)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    @property
    def ranks(self) -> dict[int, int]:
        return ranks_of(self.process.pid)

    def wait_for_ranks(self, count: int) -> None:
        """Wait until the job has so many ranks, or is over."""
        wait_for(lambda: len(self.ranks) == count or self.over, f"{count} ranks", every=0.01)

    def wait_for_history(self, more_bytes: int = 1) -> None:
        """Wait until the history is so many bytes longer than now, or the job is over."""
        before = self._history()
        wait_for(lambda: self._history() >= before + more_bytes or self.over, "the next rounds", every=0.01)

    def _history(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0
