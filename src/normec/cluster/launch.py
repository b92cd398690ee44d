"""Starting the ranks of a job on this machine, and starting them again when one of them is killed.

The environment is torchrun's, so a rank cannot tell the difference. Unlike torchrun, the parent knows a mistake of the
user (no restart helps) from a rank that was killed (the others end, and all go on from the last checkpoint), and its
exit code is that of the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

import torch.distributed as dist

_PATIENCE = 20.0  # seconds for the ranks to end by themselves once one has
_PR_SET_PDEATHSIG = 1
_PARENT = "NORMEC_LAUNCHER"


def launch(command: Sequence[str], processes: int, max_restarts: int) -> int:
    """Run `command` as so many ranks; their exit code. Ctrl-C is passed on to them once for each time it is pressed."""
    for attempt in range(max_restarts + 1):
        codes = _attempt(command, processes, attempt)
        killed = [rank for rank, code in enumerate(codes) if code < 0]
        if not killed:
            return next((code for code in codes if code), 0)
        word = f"rank {killed[0]} was killed by {signal.Signals(-codes[killed[0]]).name}"
        if attempt < max_restarts:
            print(f"{word}; starting all ranks again from the last checkpoint", file=sys.stderr, flush=True)
    print(f"error: {word}, after {max_restarts} restarts; the same command goes on from there", file=sys.stderr)
    return 1


def _attempt(command: Sequence[str], processes: int, attempt: int) -> list[int]:
    """One life of the job: every rank's exit code, negative where something else than we killed it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the last life's knows old addresses
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, and outlives the ranks
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        _PARENT: str(os.getpid()),
    }
    threads = max(1, (os.cpu_count() or 1) // processes)
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    with contextlib.ExitStack() as stack:
        notes = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes)]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=None if rank == 0 else notes[rank],
                start_new_session=True,  # Ctrl-C reaches them through us, once
            )
            for rank in range(processes)
        ]
        with _passing_on(ranks):
            codes = _wait(ranks)
    for rank in range(1, processes):
        if codes[rank] > 0 and not codes[0]:
            _relay(rank, notes[rank])
    return codes


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Until all have ended; once one has failed, the others have a moment before they are ended."""
    deadline: float | None = None
    ended_by_us: set[int] = set()
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.returncode for rank in ranks):
            deadline = time.monotonic() + _PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            for number, rank in enumerate(ranks):
                if rank.poll() is None:
                    ended_by_us.add(number)
                    rank.kill()
        time.sleep(0.02)
    return [1 if number in ended_by_us else rank.wait() for number, rank in enumerate(ranks)]


@contextlib.contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGINT and SIGTERM go on to the ranks; whatever ends this process ends them."""

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _relay(rank: int, notes: IO[bytes]) -> None:
    notes.seek(0)
    text = notes.read().decode(errors="replace").strip()
    if text:
        print(f"rank {rank}: {text.splitlines()[-1]}", file=sys.stderr)


def tie_to_parent() -> None:
    """In a rank: end when the process that started it does, however that comes about."""
    parent = os.environ.get(_PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank is gone")
