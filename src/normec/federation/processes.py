"""Processes that end when we end: on success, on error, on Ctrl-C, and also when we are killed.

Each is started through a few lines that ask the kernel to kill it when its parent dies. Flower's processes start
others, some in sessions of their own; all inherit a mark in their environment, and `stop` ends whatever bears it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MARK = "NORMEC_FEDERATION_PROCESSES"
# Asks for SIGKILL at the parent's death (prctl 1 is PR_SET_PDEATHSIG; Linux only), then becomes the command.
TETHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Processes:
    """While entered, processes can be started; none outlives the block."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._logs, self._mark = logs, secrets.token_hex(8)
        self._environment = {**os.environ, **(environment or {}), MARK: self._mark}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start `command` under a name of its own; its output goes to NAME.log. Returns the process id."""
        tethered = [sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()), *command]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                tethered,
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )
        self._started[name] = process
        return process.pid

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def last_words(self, name: str, lines: int = 5) -> str:
        """The end of a process's log, on one line."""
        path = self.log(name)
        held = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        return " / ".join(line.strip() for line in held[-lines:])

    def ended(self, name: str) -> int | None:
        """The exit code of a process that has ended, None while it runs."""
        return self._started[name].poll()

    def kill(self, name: str) -> None:
        """SIGKILL for a process and its group, as a crash would do."""
        process = self._started[name]
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, patience: float = 5.0) -> None:
        """End all that was started, and all that those started; the first one last, since the others need it."""
        started = list(self._started.values())
        for group in (started[1:], started[:1]):
            _end(group, patience)
        # What is left was started by them and has a session of its own. A process killed here may have just forked.
        until = time.monotonic() + patience
        while (left := self.marked()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._started.clear()

    def marked(self) -> list[int]:
        """Living processes that bear our mark: ours and their descendants."""
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0") and not _zombie(entry):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or not ours
                continue
        return found


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """SIGTERM, some time to leave in good order, then SIGKILL."""
    for process in processes:
        _signal_group(process.pid, signal.SIGTERM)
    until = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port on this machine that nobody uses now, if possible one that no outgoing connection is ever given.

    A port of the system's own choice may be taken by any connection before the server that it is meant for binds it,
    and a client that calls a port nobody listens on may even be given that port and connect to itself.
    """
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 0
    candidates = [20000 + secrets.randbelow(lowest - 20000) for _ in range(50)] if lowest > 21000 else []
    for candidate in [*candidates, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            port: int = probe.getsockname()[1]
            return port
    raise OSError("there is no free port on 127.0.0.1")


def _zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
