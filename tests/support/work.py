"""How much work something is, counted rather than timed: the same number on every machine."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that are made."""
    made = 0

    def count(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return made


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy hold at once."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
