"""Processes that end when we end: on success, on error, on Ctrl-C, and also when we are killed.

Each is started through a few lines that ask the kernel to kill it when its parent dies. Flower's processes start
others, some in sessions of their own; all inherit a mark in their environment, and `stop` ends whatever bears it. A
keeper does the same should we be killed: it waits at the end of a pipe that closes when we die.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...system.files import PRIVATE_FILE, private_folder

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

# Waits until its standard input closes, which happens when its parent dies, however that dies; then kills every process
# that bears the mark, until there is none. Two empty looks in a row: a process may have forked during the first.
KEEPER = """
import os, signal, sys, time
sys.stdin.buffer.read()
mark, empty, until = sys.argv[1].encode(), 0, time.monotonic() + 60
while empty < 2 and time.monotonic() < until:
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if name.isdigit() and int(name) != os.getpid() and mark in file.read().split(b"\\0"):
                    found.append(int(name))
        except OSError:
            continue
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    empty = 0 if found else empty + 1
    time.sleep(0.02)
"""
_AFTER_KILL = 60.0  # seconds for a process to be gone after SIGKILL; only one that hangs in the kernel takes longer


class Watch:
    """Another process, by a handle that never means a later process of the same number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])

    def close(self) -> None:
        os.close(self.handle)


class Processes:
    """While entered, processes can be started; none outlives the block."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._logs, self._mark = logs, secrets.token_hex(8)
        self._environment = {**os.environ, **(environment or {}), MARK: self._mark}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        private_folder(self._logs)
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", KEEPER, f"{MARK}={self._mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(2 * _AFTER_KILL)  # it gives up by itself before that

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start `command` under a name of its own; its output goes to NAME.log. Returns the process id."""
        tethered = [sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()), *command]
        # A party's log repeats what its own code says in its errors.
        handle = os.open(self.log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        with os.fdopen(handle, "ab") as log:
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
        whole = " / ".join(line.strip() for line in held[-lines:])
        return "".join(letter if letter.isprintable() else " " for letter in whole)  # nothing that moves a terminal

    def ended(self, name: str) -> int | None:
        """The exit code of a process that has ended, None while it runs."""
        return self._started[name].poll()

    def epitaph(self, name: str) -> str:
        """How a process that has ended did so, and the end of its log, on one line."""
        code = self.ended(name)
        how = (
            f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
        )
        return f"{name} {how}; its log {self.log(name)} ends with: {self.last_words(name) or '(nothing)'}"

    def kill(self, name: str) -> None:
        """SIGKILL for a process and its group, as a crash would do."""
        process = self._started[name]
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(_AFTER_KILL)

    def find(self, program: str) -> Watch | None:
        """A descendant that runs a program of this name; None where there is none, or the system cannot say."""
        if not hasattr(os, "pidfd_open"):
            return None
        for pid in self.marked():
            try:
                words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[:3]
                if program.encode() in [word.rpartition(b"/")[2] for word in words]:
                    return Watch(pid)
            except OSError:  # ended meanwhile
                continue
        return None

    def wait(self, seconds: float, also: Watch | None = None) -> None:
        """Sleep until one of the processes ends, or `also`; `seconds` at the most."""
        if not hasattr(os, "pidfd_open"):
            time.sleep(seconds)
            return
        watches = []
        try:
            for process in self._started.values():
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        watches.append(Watch(process.pid))
            handles = [watch.handle for watch in watches] + ([also.handle] if also is not None else [])
            select.select(handles, [], [], seconds)
        finally:
            for watch in watches:
                watch.close()

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL)


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
