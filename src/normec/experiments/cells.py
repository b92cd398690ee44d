"""What becomes of a cell where it is computed: in this process, in a worker, or on another machine.

Whoever runs cells hands them over as tasks and hears of them in messages: that a cell began, how far it is, how it
ended. What came out is in the cell's folder, not in the messages.
"""

from __future__ import annotations

import _thread
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import Diverged, UsageError
from ..problems.problem import Problem
from ..settings.config import RunConfig
from ..storage.history import Row
from ..training import interleaved as fleet
from ..training.callbacks import Callback
from ..training.train import ready
from . import build, runs

DONE = ("finished", "diverged")
SECONDS_BETWEEN = 0.2


@dataclass(frozen=True)
class Task:
    """A cell to be computed: its place in the list, what to run, and where it lives."""

    index: int
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Ending:
    """How a cell ended: finished, stopped, interrupted, diverged (in which round) or failed (why)."""

    status: str
    round: int | None = None
    error: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Message:
    """News of one cell; `ending` is set once, last."""

    index: int
    round: int = 0
    rounds: int | None = None
    row: Row | None = None
    ending: Ending | None = None


Report = Callable[[Message], None]
Asked = Callable[[], bool]


def run_group(group: Sequence[Task], report: Report, stop_asked: Asked = lambda: False) -> None:
    """Run cells that were grouped: on a GPU in turns, a round each, elsewhere one after another.

    A cell that cannot be run is reported as failed, whatever the reason: the others go on. After a request to stop,
    cells that have not begun are left out.
    """
    device = build.device(group[0].config.device)
    alike = len({(task.config.device, task.config.precision) for task in group}) == 1
    if len(group) > 1 and device.type == "cuda" and alike and not stop_asked():
        _run_in_turns(group, device, report, stop_asked)
        return
    for task in group:
        if stop_asked():
            return
        report(Message(task.index))
        ending = run_cell(task, report, stop_asked)
        report(Message(task.index, ending=ending))
        if ending.status == "interrupted":
            return


def _run_in_turns(group: Sequence[Task], device: torch.device, report: Report, stop_asked: Asked) -> None:
    problems: dict[str, Problem] = {}

    def steps(task: Task) -> Generator[None, None, None]:
        report(Message(task.index))
        held = build.known_by(task.config)

        def begun() -> Generator[None, None, runs.Result]:
            if held not in problems:  # cells that differ in their step size share their data
                problems[held] = build.problem(task.config).to(device)
            watch = _Watch(task.index, report, lambda: False)
            return (yield from runs.steps(task.config, task.folder, [watch], stop_asked, problems[held]))

        def guarded() -> Generator[None, None, Ending]:
            stepping = begun()
            while True:
                try:
                    next(stepping)
                except StopIteration as end:
                    return Ending(end.value.summary["status"], end.value.summary["round"])
                except Exception as error:  # the border between a cell and the rest of a sweep
                    return _mishap(task, error)
                yield

        report(Message(task.index, ending=(yield from guarded())))

    with ready(group[0].config.precision):
        fleet.together([steps(task) for task in group], device)


def ended(task: Task) -> Ending | None:
    """How a cell ended by the word of its folder; None if it is not done, or the folder is damaged."""
    try:
        found = runs.held(task.folder, task.config)
    except UsageError:
        return None
    if found is None or found.summary["status"] not in DONE:
        return None
    return Ending(found.summary["status"], found.summary.get("round"), found.summary.get("error"))


def run_cell(task: Task, report: Report, stop_asked: Asked) -> Ending:
    """Train one cell in its folder."""
    try:
        result = runs.execute(task.config, task.folder, [_Watch(task.index, report, stop_asked)])
    except Exception as error:  # the border between a cell and the rest of a sweep
        return _mishap(task, error)
    return Ending(result.summary["status"], result.summary["round"])


def _mishap(task: Task, error: Exception) -> Ending:
    match error:
        case Diverged():
            return Ending("diverged", error.round, str(error))
        case UsageError():
            return Ending("failed", error=str(error))
        case OSError():
            return Ending("failed", error=f"{error.filename or task.folder}: {error.strerror or error}")
    trace = "".join(traceback.format_exception(error))
    return Ending("failed", error=f"{type(error).__name__}: {error}", traceback=trace)


class _Watch(Callback):
    """Reports how far a run is, and turns a request to stop into the Ctrl-C that ends a run after its round."""

    def __init__(self, index: int, report: Report, stop_asked: Asked) -> None:
        self._index, self._report, self._stop_asked = index, report, stop_asked
        self._rounds: int | None = None
        self._row: Row = {}
        self._last = 0.0
        self._told = False

    def begin(self, first_round: int, rounds: int) -> None:
        self._rounds = rounds
        self._report(Message(self._index, first_round, rounds))

    def row(self, row: Row) -> None:
        self._row = self._row | row

    def round(self, round: int) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        self._report(Message(self._index, round, self._rounds, self._row))
        if not self._told and self._stop_asked():
            self._told = True
            _thread.interrupt_main()  # Ctrl-C, for processes too in which the signal itself is blocked
