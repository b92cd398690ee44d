"""The current process: its identity, its parent, Ctrl-C, and its memory.

This module imports nothing heavy, because a rank calls `exit_with_parent` before it imports torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

PARENT = "NORMEC_LAUNCHER"  # environment variable with the process id of the launcher
_PR_SET_PDEATHSIG = 1
_TRIM, _MMAP, _MOST = -1, -3, 2**30  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, and the value of both

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def process_identity() -> tuple[int, int]:
    """Return a value that differs between this process and every process that it was forked from.

    A process id alone is not enough: a child may have its parent's id in another namespace, and ids are reused.

    Returns:
        The number of forks since the first process, and the process id.
    """
    return _forks, os.getpid()


def exit_with_parent() -> None:
    """End this process when its launcher ends, however it ends; do nothing without a launcher."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank has ended")


class Interrupt:
    """Treats Ctrl-C as a request to stop: in this context, in the main thread, the first SIGINT sets `asked`.

    A loop checks `asked` after each round. The second SIGINT raises `KeyboardInterrupt`.
    """

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


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to 1 GiB; other C libraries are left alone.

    glibc maps every large block afresh and returns it to the system when it is freed. A training step on a CPU frees
    its activations every round, and the pages must be zeroed and faulted in again: 10 to 20 % of the time of a
    convolutional network. The setting belongs to the whole process, so only the `normec` command, the process of a
    federation's server and the benchmarks make it, never the library.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP, _MOST)
        library.mallopt(_TRIM, _MOST)
