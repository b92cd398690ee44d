"""Launching the ranks of a job on this machine, and restarting them if one is killed.

The environment variables are torchrun's, so a rank cannot tell the difference. Unlike torchrun, the launcher
distinguishes a user's mistake, after which a restart does not help, from a rank that was killed, after which all ranks
continue from the last checkpoint. Its exit code is that of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType
from typing import IO

import torch.distributed as dist

from ..system.processes import PARENT
from .rank_status import RankStatus, attempt_store

_PATIENCE = 20.0  # seconds for the ranks to end by themselves, with a message, after one has failed
_PATIENCE_AFTER_KILL = 5.0  # the same if all ranks are restarted anyway
_AFTER_KILL = 60.0  # seconds for the system to end a killed process
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE, signal.SIGSEGV)
_ASKED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class _Ending:
    """How a rank ended: its exit code, which is negative for a signal; `by_us`: the launcher killed it."""

    rank: int
    code: int
    by_us: bool = False

    @property
    def killed(self) -> bool:
        return self.code < 0 and not self.by_us

    @property
    def crashed(self) -> bool:
        return -self.code in _CRASHES

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def launch(command: Sequence[str], processes: int, max_restarts: int) -> int:
    """Run `command` as several ranks on this machine, and restart them if one of them is killed.

    Ctrl-C and SIGTERM are passed on to the ranks each time; after that, nothing is restarted.

    Returns:
        The exit code of the ranks: that of the first one that failed, or 0; 128 and the signal that stopped the job.
    """
    for attempt in range(max_restarts + 1):
        endings, asked = _attempt(command, processes, attempt)
        failed = [ending for ending in endings if ending.code and not ending.by_us]
        killed = [ending for ending in failed if ending.killed]
        if asked is not None:  # a rank that hears it while Python starts ends with another exit code
            return 128 + asked if any(ending.code for ending in endings) else 0
        if not killed:
            return next((ending.exit_code for ending in failed), 0)
        first = min(killed, key=lambda ending: ending.crashed)  # other ranks may crash as a consequence
        reason = f"rank {first.rank} was killed by {signal.Signals(-first.code).name}"
        if attempt < max_restarts:
            print(f"{reason}; restarting all ranks from the last checkpoint", file=sys.stderr, flush=True)
    print(
        f"error: {reason}, after {max_restarts} restarts; the same command continues from the last checkpoint",
        file=sys.stderr,
    )
    return 1


def _attempt(command: Sequence[str], processes: int, attempt: int) -> tuple[list[_Ending], int | None]:
    """Run the job once; returns how the ranks ended, in order, and the signal that asked them to stop, if any."""
    with contextlib.ExitStack() as stack:
        store = _store()
        notes = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes)]
        shared = attempt_store(store, str(attempt))
        job = stack.enter_context(_Job([RankStatus(shared, rank, processes, None) for rank in range(processes)]))
        for rank in range(processes):
            job.start(command, _environment(rank, processes, attempt, store.port), None if rank == 0 else notes[rank])
        endings = job.wait()
        silent = all(ending.by_us or not ending.code for ending in endings if ending.rank == 0)
        for ending in endings:
            if ending.rank and ending.code > 0 and not ending.by_us and silent:
                _relay(ending.rank, notes[ending.rank])
        return endings, job.asked


def _store() -> dist.TCPStore:
    """Return a store on the loopback interface for one attempt; the store of an earlier attempt has old addresses."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # Pass our own socket to the store, because it would bind its socket to all interfaces.
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _environment(rank: int, processes: int, attempt: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store belongs to the parent and outlives the ranks
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "GLOO_SOCKET_IFNAME": _LOOPBACK,  # ranks on one machine need no other interface, and nobody else can connect
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        PARENT: str(os.getpid()),
    }


class _Job:
    """The ranks of one attempt.

    While the context is entered, SIGINT and SIGTERM are passed on to the ranks. Whatever ends this process ends them.
    """

    def __init__(self, statuses: Sequence[RankStatus]) -> None:
        """`statuses`: where to record that a rank was killed, for each rank."""
        self.asked: int | None = None  # the signal that was passed on last
        self._statuses = statuses
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._endings: dict[int, _Ending] = {}  # in the order in which they were detected
        self._killed: set[int] = set()

    def __enter__(self) -> _Job:
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._handlers = {number: signal.signal(number, self._pass_on) for number in _ASKED}
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # it wakes `_sleep`
        self._outer_wake = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_running()
        self._wait_after_kill()
        signal.set_wakeup_fd(self._outer_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._woken.close()
        self._wake.close()

    def start(self, command: Sequence[str], environment: dict[str, str], errors: IO[bytes] | None) -> None:
        """Start the next rank. Its output goes to `errors`; with None, it is printed."""
        if self.asked is not None:
            return
        rank = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if errors is None else subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # the launcher passes Ctrl-C on, once
        )
        self._ranks.append(rank)
        self._tell([rank])  # a signal that came during the start; the rank would wait for others that never come

    def wait(self) -> list[_Ending]:
        """Wait until all ranks have ended; after a failure, the others are killed if they do not end soon."""
        while self._running() and not any(ending.code for ending in self._endings.values()):
            self._sleep(None)
        killed = any(ending.killed for ending in self._endings.values())
        deadline = time.monotonic() + (_PATIENCE_AFTER_KILL if killed else _PATIENCE)
        while self._running() and time.monotonic() < deadline:
            self._sleep(deadline - time.monotonic())
        self._kill_running()
        self._wait_after_kill()
        return list(self._endings.values())

    def _running(self) -> list[int]:
        """Return the ranks that are still running, and record how the others ended."""
        for number, rank in enumerate(self._ranks):
            code = rank.poll()
            if code is not None and number not in self._endings:
                ending = self._endings[number] = _Ending(number, code, by_us=number in self._killed)
                if ending.killed:
                    self._statuses[number].record_exit(f"killed by {signal.Signals(-code).name}")
        return [number for number in range(len(self._ranks)) if number not in self._endings]

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until a signal arrives, including the end of a child, or the time is over."""
        wait([self._woken], None if seconds is None else max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _kill_running(self) -> None:
        for number in self._running():
            self._killed.add(number)
            self._ranks[number].kill()

    def _wait_after_kill(self) -> None:
        deadline = time.monotonic() + _AFTER_KILL
        while self._running() and time.monotonic() < deadline:
            self._sleep(deadline - time.monotonic())
        for number in self._running():
            self._endings[number] = _Ending(number, 1, by_us=True)
            process = self._ranks[number].pid
            print(f"rank {number} (process {process}) was killed but does not end; check the process", file=sys.stderr)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.asked = number
        self._tell(self._ranks)

    def _tell(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Pass the signal that asked the job to stop on to ranks, if there was one."""
        for rank in ranks:
            if self.asked is not None and rank.poll() is None:
                rank.send_signal(self.asked)


def _relay(rank: int, notes: IO[bytes]) -> None:
    notes.seek(0)
    text = notes.read().decode(errors="replace").strip()
    if text:
        print(f"rank {rank}: {text.splitlines()[-1]}", file=sys.stderr)
