"""Worker processes that are forked where torch is imported; what starts them asks for processes from nothing.

Both contexts stand in for that of `multiprocessing` with the method "spawn".
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerContext
from typing import Any


class ForkingContext:
    """Forks from the process itself, which must have one thread. A fork closes the parent's ends of all pipes."""

    def __init__(self) -> None:
        self._ours: list[Connection] = []

    def Pipe(self) -> tuple[Connection, Connection]:  # noqa: N802  # the names of `multiprocessing`
        ours, theirs = multiprocessing.Pipe()
        self._ours.append(ours)
        return ours, theirs

    def Process(self, target: Callable[..., object], args: tuple[object, ...], daemon: bool) -> ForkProcess:  # noqa: N802
        return ForkProcess(target=self._run, args=(target, args), daemon=daemon)

    def _run(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        for end in self._ours:
            with suppress(OSError):  # it is closed
                end.close()
        target(*args)


def from_a_server(*modules: str) -> Callable[[str], ForkServerContext]:
    """Return a `get_context` whose processes are forked from a server that has imported these modules.

    The server is the same for all tests of a process: it has the modules of the test that uses one first.
    """

    def context(_: Any) -> ForkServerContext:
        found = multiprocessing.get_context("forkserver")
        found.set_forkserver_preload(list(modules))
        return found

    return context
