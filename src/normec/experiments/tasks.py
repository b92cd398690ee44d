"""The cells of a sweep as tasks, run in this process or in worker processes.

A task names a cell, its configuration and its folder. Whoever runs tasks reports their progress: that a cell began, how
far it is, and how it ended. Results are in the cell's folder, not in the reports.

Workers are spawned, each in a process group of its own, so that Ctrl-C in a terminal reaches the parent alone. The
parent asks the workers to stop, and they stop after the current round. A worker that dies takes only its current cell
with it, and a worker ends itself when its parent is gone.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ..algorithms.catalogue import METHODS
from ..errors import Diverged, UsageError
from ..problems.problem import Problem
from ..settings.config import RunConfig
from ..storage.history import Row
from ..system.code_files import in_a_file
from ..training.callbacks import Callback
from ..training.interleaved import run_interleaved
from ..training.saved_run import Result
from ..training.train import ready
from . import build, runs

DONE = ("finished", "diverged")
SECONDS_BETWEEN = 0.2
SECONDS_TO_LOOK = 0.2
SECONDS_TO_LEAVE = 10.0


@dataclass(frozen=True)
class Task:
    """A cell to compute: its index in the sweep, its configuration and its folder."""

    index: int
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Ending:
    """How a cell ended: finished, stopped, interrupted, diverged (in `round`) or failed (with `error`).

    The text of an error may quote records. `kind` is what the files of a private run say instead of such a text.
    """

    status: str
    round: int | None = None
    error: str | None = None
    traceback: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of one cell; `ending` is set in the last report only."""

    index: int
    round: int = 0
    rounds: int | None = None
    row: Row | None = None
    ending: Ending | None = None


Report = Callable[[Progress], None]
StopAsked = Callable[[], bool]


def run_group(group: Sequence[Task], report: Report, stop_asked: StopAsked = lambda: False) -> None:
    """Run the cells of a group: in turns on a GPU, one round each, and one after another otherwise.

    Runs in turns have streams of their own and share their data, so code of the user's own, which may write to the same
    memory in every call, runs for one cell after another.

    A cell that cannot run is reported as failed, whatever the reason, and the others continue. After a request to stop,
    cells that have not begun are skipped.
    """
    device = build.device(group[0].config.device)
    alike = len({(task.config.device, task.config.precision) for task in group}) == 1
    own = any(names_own_code(task.config) for task in group)
    if len(group) > 1 and device.type == "cuda" and alike and not own and not stop_asked():
        _run_in_turns(group, device, report, stop_asked)
        return
    for task in group:
        if stop_asked():
            return
        report(Progress(task.index))
        ending = run_cell(task, report, stop_asked)
        report(Progress(task.index, ending=ending))
        if ending.status == "interrupted":
            return


def names_own_code(config: RunConfig) -> bool:
    """Whether the data, the model or the method of a run are code that does not belong to this library."""
    return in_a_file(config.data) or in_a_file(config.model) or config.method not in METHODS


def _run_in_turns(group: Sequence[Task], device: torch.device, report: Report, stop_asked: StopAsked) -> None:
    problems: dict[str, Problem] = {}

    def steps(task: Task) -> Generator[None, None, None]:
        report(Progress(task.index))
        held = build.problem_key(task.config)

        def begun() -> Generator[None, None, Result]:
            if held not in problems:  # cells that differ only in their step size share their data
                problems[held] = build.problem(task.config).to(device)
            reporter = _ProgressReporter(task.index, report, lambda: False)
            return (yield from runs.steps(task.config, task.folder, [reporter], stop_asked, problems[held]))

        def guarded() -> Generator[None, None, Ending]:
            stepping = begun()
            while True:
                try:
                    next(stepping)
                except StopIteration as end:
                    return Ending(end.value.summary["status"], end.value.summary["round"])
                except Exception as error:  # the failure of a cell must not end the sweep
                    return _failure(task, error)
                yield

        report(Progress(task.index, ending=(yield from guarded())))

    with ready(group[0].config.precision):
        run_interleaved([steps(task) for task in group], device)


def ended(task: Task) -> Ending | None:
    """Return how a cell ended, from its folder; None if it is not done, or the folder is damaged."""
    try:
        found = runs.existing(task.folder, task.config)
    except UsageError:
        return None
    if found is None or found.summary["status"] not in DONE:
        return None
    return Ending(found.summary["status"], found.summary.get("round"), found.summary.get("error"))


def run_cell(task: Task, report: Report, stop_asked: StopAsked) -> Ending:
    """Train one cell in its folder."""
    try:
        result = runs.execute(task.config, task.folder, [_ProgressReporter(task.index, report, stop_asked)])
    except Exception as error:  # the failure of a cell must not end the sweep
        return _failure(task, error)
    return Ending(result.summary["status"], result.summary["round"])


def _failure(task: Task, error: Exception) -> Ending:
    kind = type(error).__name__
    match error:
        case Diverged():
            return Ending("diverged", error.round, str(error))
        case UsageError():
            return Ending("failed", error=str(error), kind=kind)
        case OSError():
            return Ending("failed", error=f"{error.filename or task.folder}: {error.strerror or error}", kind=kind)
    trace = "".join(traceback.format_exception(error))
    return Ending("failed", error=f"{kind}: {error}", traceback=trace, kind=kind)


class _ProgressReporter(Callback):
    """Reports the progress of a run, and turns a request to stop into a Ctrl-C, which ends a run after its round."""

    def __init__(self, index: int, report: Report, stop_asked: StopAsked) -> None:
        self._index, self._report, self._stop_asked = index, report, stop_asked
        self._rounds: int | None = None
        self._row: Row = {}
        self._last = 0.0
        self._stop_requested = False

    def begin(self, first_round: int, rounds: int) -> None:
        self._rounds = rounds
        self._report(Progress(self._index, first_round, rounds))

    def row(self, row: Row) -> None:
        self._row = self._row | row

    def round(self, round: int) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        self._report(Progress(self._index, round, self._rounds, self._row))
        if not self._stop_requested and self._stop_asked():
            self._stop_requested = True
            _thread.interrupt_main()  # like Ctrl-C, but also for processes in which the signal is blocked


def run_in_workers(
    groups: Sequence[Sequence[Task]], jobs: int, threads: int, report: Report, stop_asked: StopAsked
) -> None:
    """Run all groups in `jobs` processes with `threads` threads of torch each; returns when all have ended."""
    waiting = deque(list(group) for group in groups)
    workers: list[_Worker] = []
    stopping = False
    try:
        while True:
            if stop_asked() and not stopping:
                stopping = True
                waiting.clear()
                for worker in workers:
                    worker.send(None)
            workers = [worker for worker in workers if worker.group or worker.alive()]
            for worker in workers:
                if waiting and not worker.group:
                    worker.send(waiting.popleft())
            while waiting and len(workers) < jobs:
                workers.append(_Worker(threads))
                workers[-1].send(waiting.popleft())
            busy = {worker.pipe: worker for worker in workers if worker.group}
            if not busy:
                return
            for pipe in connection.wait(list(busy), SECONDS_TO_LOOK):
                worker = busy[pipe]  # type: ignore[index]  # `wait` returns the objects that it was given
                progress = worker.receive()
                if progress is not None:
                    report(progress)
                    continue
                workers.remove(worker)
                first, *others = worker.group
                report(
                    Progress(
                        first.index, ending=Ending("interrupted" if stopping else "failed", error=worker.exit_reason())
                    )
                )
                if others and not stopping:
                    waiting.appendleft(others)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A worker process, the pipe to it, and the cells that it has not finished."""

    def __init__(self, threads: int) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the worker inherits this until it is ready
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()  # so that the pipe closes when the worker dies
        self.group: list[Task] = []

    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, group: list[Task] | None) -> None:
        """Send a group to the worker; None asks it to stop."""
        if group is not None:
            self.group = group
        with suppress(OSError):  # the worker is dead, which the next `receive` reports
            self.pipe.send(group)

    def receive(self) -> Progress | None:
        """Return the next report, or None if there will be no more."""
        try:
            progress: Progress = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if progress.ending is not None:
            self.group = [task for task in self.group if task.index != progress.index]
            if progress.ending.status == "interrupted":
                self.group = []
        return progress

    def exit_reason(self) -> str:
        """Return why the process ended."""
        self._process.join(SECONDS_TO_LEAVE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        if code >= 0:
            return f"its process ended with code {code}"
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (" (perhaps for lack of memory)" if name == "SIGKILL" else "")

    def end(self) -> None:
        """Close the pipe, which ends an idle worker; kill a worker that still has cells."""
        if self.group:
            self._process.kill()
        self.pipe.close()
        self._process.join()


def _serve(pipe: Connection, threads: int) -> None:
    """Run groups from the pipe until it closes or sends None; the main function of a worker."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(threads)
    stopped = False

    def stop_asked() -> bool:
        nonlocal stopped
        while not stopped and pipe.poll():
            stopped = pipe.recv() is None  # while a group runs, only a request to stop is sent
        return stopped

    try:
        while not stopped:
            group = pipe.recv()
            if group is None:
                return
            run_group(group, pipe.send, stop_asked)
    except (EOFError, OSError):
        return  # the parent has ended


def _follow_parent() -> None:
    """End this process when its parent ends, however it ends; the run can continue from its checkpoint."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
