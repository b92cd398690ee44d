"""A process that ends with the one that started it. Imports nothing heavy, so that it can be asked first of all."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "NORMEC_LAUNCHER"  # in the environment: the number of the process to end with
_PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """In a rank: end when the process that started it does, however that comes about."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank is gone")
