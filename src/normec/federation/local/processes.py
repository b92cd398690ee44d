"""Child processes that end with this process: on success, on errors, on Ctrl-C, and also when it is killed.

Each child is started by a few lines that ask the kernel to kill it when its parent dies. Flower's processes start
others, some in sessions of their own. All of them inherit a mark in their environment, and `stop` ends every process
that has the mark. A watchdog does the same if this process is killed: it waits at the end of a pipe that closes then.
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
from multiprocessing.connection import wait
from pathlib import Path

from ...system.files import PRIVATE_FILE, private_folder

MARK = "NORMEC_FEDERATION_PROCESSES"
# Asks for SIGKILL at the parent's death (prctl 1 is PR_SET_PDEATHSIG; Linux only), then becomes the command.
DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

# Waits until its standard input closes, which happens whenever its parent ends; then kills every process with the mark
# until there is none. It looks twice, because a process may fork during the first look.
WATCHDOG = """
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
_TAIL = 5  # lines of a log that an error repeats
_AFTER_KILL = 60.0  # seconds for a process to end after SIGKILL; only one that hangs in the kernel takes longer


class Watch:
    """Another process, by a file descriptor that cannot refer to a later process with the same number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        return bool(wait([self.handle], 0))

    def close(self) -> None:
        os.close(self.handle)


class Processes:
    """A context in which processes can be started; none of them outlives it."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._logs, self._mark = logs, secrets.token_hex(8)
        self._environment = {**os.environ, **(environment or {}), MARK: self._mark}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._log_begins: dict[str, int] = {}  # the length of a process's log when it was started
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        private_folder(self._logs)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHDOG, f"{MARK}={self._mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
            self._watchdog.wait(2 * _AFTER_KILL)  # it stops by itself before that

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start `command` under a name; its output goes to NAME.log. Returns the process id."""
        tethered = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        # The log of a party repeats the error messages of its own code, so only the owner may read it.
        handle = os.open(self.log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        with os.fdopen(handle, "ab") as log:
            self._log_begins[name] = os.fstat(handle).st_size
            process = subprocess.Popen(
                tethered,
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is handled by this process only
            )
        self._started[name] = process
        return process.pid

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """The last lines of a process's log, on one line."""
        path = self.log(name)
        held = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        whole = " / ".join(line.strip() for line in held[-_TAIL:])
        return "".join(c if c.isprintable() else " " for c in whole)  # no control characters reach the terminal

    def has_logged(self, name: str, texts: Sequence[str]) -> bool:
        """Whether a process has written one of these texts to its log since it was started."""
        with self.log(name).open("rb") as log:
            log.seek(self._log_begins[name])
            written = log.read()
        return any(text.encode() in written for text in texts)

    def started(self, name: str) -> bool:
        """Whether a process was started under a name."""
        return name in self._started

    def ended(self, name: str) -> int | None:
        """The exit code of a process, or None while it runs."""
        return self._started[name].poll()

    def describe_exit(self, name: str) -> str:
        """How a process ended, with the end of its log, on one line."""
        code = self.ended(name)
        how = (
            f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
        )
        return f"{name} {how}; its log {self.log(name)} ends with: {self.log_tail(name) or '(nothing)'}"

    def kill(self, name: str) -> None:
        """Kill a process and its group with SIGKILL."""
        process = self._started[name]
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(_AFTER_KILL)

    def find(self, program: str) -> Watch | None:
        """A descendant that runs a program with this name; None if there is none or the system cannot tell."""
        if not hasattr(os, "pidfd_open"):
            return None
        for pid in self.marked():
            try:
                words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[:3]
                if program.encode() in [word.rpartition(b"/")[2] for word in words]:
                    return Watch(pid)
            except OSError:  # it has ended
                continue
        return None

    def wait(self, seconds: float, also: Watch | None = None) -> None:
        """Wait until one of the processes or `also` ends, at most `seconds`."""
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
            wait(handles, seconds)
        finally:
            for watch in watches:
                watch.close()

    def stop(self, patience: float = 5.0) -> None:
        """End all processes and their descendants; the first process ends last, because the others need it."""
        started = list(self._started.values())
        for group in (started[1:], started[:1]):
            _end(group, patience)
        # The remaining ones were started by these in sessions of their own. A process killed here may have just forked.
        until = time.monotonic() + patience
        while (left := self.marked()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._started.clear()

    def marked(self) -> list[int]:
        """Running processes with the mark: those that were started here, and their descendants."""
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0") and not _zombie(entry):
                    found.append(int(entry.name))
            except OSError:  # it has ended or belongs to another user
                continue
        return found


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Send SIGTERM, wait `patience` seconds, then send SIGKILL."""
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
    """A free port on this machine, if possible outside the range of outgoing connections.

    A port that the system chooses may be taken by any connection before the server binds it, and a client that connects
    to a port without a listener may even be assigned that port and connect to itself.
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
