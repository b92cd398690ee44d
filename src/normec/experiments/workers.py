"""Cells in worker processes: one that dies takes its cell with it, and no other.

Workers are spawned, each in a process group of its own, so that Ctrl-C in a terminal reaches the parent alone; it
asks the workers to stop, and they do after the current round. A worker ends itself when its parent is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection

from .cells import Asked, Ending, Message, Report, Task, run_group

SECONDS_TO_LOOK = 0.2
SECONDS_TO_LEAVE = 10.0


def run_groups(groups: Sequence[Sequence[Task]], jobs: int, threads: int, report: Report, stop_asked: Asked) -> None:
    """Run every group in one of `jobs` processes with `threads` threads of torch each; returns when all have ended."""
    waiting = deque(list(group) for group in groups)
    workers: list[_Worker] = []
    told = False
    try:
        while True:
            if stop_asked() and not told:
                told = True
                waiting.clear()
                for worker in workers:
                    worker.give(None)
            workers = [worker for worker in workers if worker.group or worker.alive()]
            for worker in workers:
                if waiting and not worker.group:
                    worker.give(waiting.popleft())
            while waiting and len(workers) < jobs:
                workers.append(_Worker(threads))
                workers[-1].give(waiting.popleft())
            busy = {worker.pipe: worker for worker in workers if worker.group}
            if not busy:
                return
            for pipe in connection.wait(list(busy), SECONDS_TO_LOOK):
                worker = busy[pipe]  # type: ignore[index]  # `wait` returns what it was given
                message = worker.hear()
                if message is not None:
                    report(message)
                    continue
                workers.remove(worker)
                first, *others = worker.group
                report(Message(first.index, ending=Ending("interrupted" if told else "failed", error=worker.epitaph())))
                if others and not told:
                    waiting.appendleft(others)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process, the pipe to it, and the cells it still owes."""

    def __init__(self, threads: int) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, until the worker is ready
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()  # so that the death of the worker is the end of the pipe
        self.group: list[Task] = []

    def alive(self) -> bool:
        return self._process.is_alive()

    def give(self, group: list[Task] | None) -> None:
        """Hand over a group; None asks to stop."""
        if group is not None:
            self.group = group
        with suppress(OSError):  # it is dead then, which the next `hear` will say
            self.pipe.send(group)

    def hear(self) -> Message | None:
        """The next message; None if there will be no more."""
        try:
            message: Message = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if message.ending is not None:
            self.group = [task for task in self.group if task.index != message.index]
            if message.ending.status == "interrupted":
                self.group = []
        return message

    def epitaph(self) -> str:
        """Why the process is no more."""
        self._process.join(SECONDS_TO_LEAVE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        if code >= 0:
            return f"its process ended with code {code}"
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (" (is the memory enough?)" if name == "SIGKILL" else "")

    def end(self) -> None:
        """A worker without cells leaves when its pipe closes; one that still has some is stopped at once."""
        if self.group:
            self._process.kill()
        self.pipe.close()
        self._process.join()


def _serve(pipe: Connection, threads: int) -> None:
    """A worker's life."""
    import torch

    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(threads)
    stopped = False

    def stop_asked() -> bool:
        nonlocal stopped
        while not stopped and pipe.poll():
            stopped = pipe.recv() is None  # nothing but a request to stop comes while a group is under way
        return stopped

    try:
        while not stopped:
            group = pipe.recv()
            if group is None:
                return
            run_group(group, pipe.send, stop_asked)
    except (EOFError, OSError):
        return  # the parent is gone


def _follow_parent() -> None:
    """End with the parent, however it ended: a run that is cut off goes on from its checkpoint."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
