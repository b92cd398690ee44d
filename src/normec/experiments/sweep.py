"""Sweeps: many runs, each in its own folder. Finished runs are skipped, stopped runs continue, failures are recorded.

    OUT/sweep.toml            the grid
    OUT/cells/NAME-digest/    the run folder of a cell

A cell is identified by the digest of its configuration, so a grid may grow and its cells may be renamed without running
anything twice. A cell that diverged is done; a cell that failed is tried again by the next sweep in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import Interrupted, Unwritable, UsageError, at_least
from ..report import page
from ..settings.config import RunConfig
from ..storage.history import History, Row
from ..storage.run_folder import FolderLock
from ..system.files import write_atomic
from ..system.processes import Interrupt
from ..training import saved_run
from ..training.summary import record_end
from . import build, runs
from .grid import Cell, Grid
from .tasks import DONE, Ending, Progress, Task, run_group, run_in_workers

WITHHELD = "whose text is left out here, because it may quote the clients' records; `normec train` shows it"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: "finished", "diverged", "failed" or "stopped", with its summary and history."""

    cell: Cell
    status: str
    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    error: str | None = None
    skipped: bool = False  # it had ended before


@dataclass(frozen=True)
class Event:
    """An event of a sweep: a cell began, is in round `round` of `rounds`, or ended with `outcome`."""

    cell: Cell
    round: int = 0
    rounds: int | None = None
    row: Row | None = None
    outcome: Outcome | None = None


def sweep(
    grid: Grid,
    text: str,
    out: Path,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    **how: Any,
) -> list[Outcome]:
    """Run a grid in `out`, store its file (`text`) there, and write a page; `how` is passed to `run_cells`."""
    outcomes = run_cells(grid.cells, out, jobs, on_event, **how, text=text)
    _write_page(out)
    return outcomes


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    *,
    threads: int | None = None,
    together: int = 1,
    ray: str | None = None,
    text: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Run every cell that is not done yet; returns all outcomes in the order of the cells.

    The cells run in `jobs` processes with `threads` threads of torch each. By default, a process has one thread and
    there are as many processes as cores, or a single process on a GPU. A process gets `together` cells at a time. With
    `ray`, the address of a Ray cluster or "auto", the cells are tasks of the cluster, whose machines must share the
    folder `out`. `text` is the grid's file, which is stored as sweep.toml.

    After Ctrl-C, or when `stop` returns True, the running cells end after their round with a checkpoint, and
    `Interrupted` is raised. If the disk cannot be written any more, the sweep ends with an OSError. All other failures
    are outcomes.
    """
    at_least(1, together=together)
    for name, given in (("jobs", jobs), ("threads", threads)):
        if given is not None:
            at_least(1, **{name: given})
    if ray is None:
        for device in {cell.config.device for cell in cells}:
            build.device(device)  # refuses a device that does not exist here
    with _LockedFolder(out), Interrupt() as interrupt:
        if text is not None:
            write_atomic(out / "sweep.toml", text)
        under_way = _Sweep(cells, out.resolve(), on_event or (lambda _: None), interrupt, stop)
        return under_way.run(jobs, threads, together, ray)


def cell_states(cells: Sequence[Cell], out: Path) -> list[tuple[Path, str]]:
    """Return each cell's folder and state, which is its status, "begun", "waiting" or "damaged"; nothing is run."""
    found = []
    for cell, folder in zip(cells, _folders(cells, out), strict=True):
        try:
            held = runs.existing(folder, cell.config)
        except UsageError:
            found.append((folder, "damaged"))
            continue
        begun = "begun" if (folder / "config.toml").exists() else "waiting"
        found.append((folder, held.summary["status"] if held is not None else begun))
    return found


class _Sweep:
    """A running sweep."""

    def __init__(
        self,
        cells: Sequence[Cell],
        out: Path,
        on_event: Callable[[Event], None],
        interrupt: Interrupt,
        stop: Callable[[], bool],
    ) -> None:
        self.cells, self.on_event, self.interrupt, self.stop = cells, on_event, interrupt, stop
        self.folders = _folders(cells, out)
        self.outcomes: dict[int, Outcome] = {}
        self.unwritable: OSError | None = None

    def run(self, jobs: int | None, threads: int | None, together: int, ray: str | None) -> list[Outcome]:
        todo: list[Task] = []
        first: dict[Path, int] = {}
        for index, (cell, folder) in enumerate(zip(self.cells, self.folders, strict=True)):
            if first.setdefault(folder, index) != index:
                continue  # the same run as an earlier cell
            known = _known(cell, folder)
            if known is None:
                todo.append(Task(index, cell.config, folder))
            else:
                self._ended(index, known)
        groups = [todo[start : start + together] for start in range(0, len(todo), together)]
        if ray is not None:
            from . import ray_tasks

            ray_tasks.run_on_ray(groups, ray, jobs, threads or 1, self._receive, self._stop_asked)
        else:
            jobs = min(jobs or _default_jobs([task.config for task in todo], threads or 1), len(groups))
            if jobs > 1:
                run_in_workers(groups, jobs, threads or 1, self._receive, self._stop_asked)
            else:
                self._run_here(groups, threads)
        if self.unwritable is not None:
            raise self.unwritable
        if len(self.outcomes) < len(first):
            raise Interrupted
        for index, (cell, folder) in enumerate(zip(self.cells, self.folders, strict=True)):
            if index not in self.outcomes:
                self._ended(index, replace(self.outcomes[first[folder]], cell=cell, skipped=True))
        return [self.outcomes[index] for index in range(len(self.cells))]

    def _run_here(self, groups: Sequence[Sequence[Task]], threads: int | None) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            for group in groups:
                if not self._stop_asked():
                    run_group(group, self._receive, self._stop_asked)
        finally:
            torch.set_num_threads(before)

    def _stop_asked(self) -> bool:
        return self.interrupt.asked or self.unwritable is not None or self.stop()

    def _receive(self, progress: Progress) -> None:
        cell, folder = self.cells[progress.index], self.folders[progress.index]
        if progress.ending is None:
            self.on_event(Event(cell, progress.round, progress.rounds, progress.row))
        elif progress.ending.status == "interrupted":
            self.interrupt.asked = True
        else:
            try:
                outcome = _outcome(cell, folder, progress.ending)
            except OSError as error:
                self.unwritable = Unwritable(f"{error}; what is done is kept")
                return
            self._ended(progress.index, outcome)

    def _ended(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.on_event(Event(self.cells[index], outcome=outcome))


class _LockedFolder:
    """A context in which the sweep's folder is locked for this process."""

    def __init__(self, out: Path) -> None:
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; a sweep needs a folder")
        self._lock = FolderLock(out)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _folders(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Return the folders of the cells; a folder whose name ends with a cell's digest belongs to the cell."""
    present = {path.name.rpartition("-")[2]: path for path in (out / "cells").glob("*-*")}
    return [present.setdefault(cell.config.digest(), out / "cells" / cell.name) for cell in cells]


def _known(cell: Cell, folder: Path) -> Outcome | None:
    """Return the outcome of a cell that is done; None if it has to run, which reports what is wrong with its folder."""
    try:
        found = runs.existing(folder, cell.config)
    except UsageError as error:
        return Outcome(cell, "failed", folder, error=str(error))
    if found is None or found.summary["status"] not in DONE:
        return None
    summary = found.summary
    return Outcome(cell, summary["status"], folder, summary, found.history, summary.get("error"), skipped=True)


def _outcome(cell: Cell, folder: Path, ending: Ending) -> Outcome:
    """Return the outcome of a cell, and record its end in its folder if the cell could not do so."""
    try:
        found = runs.existing(folder, cell.config)
        if ending.status == "failed" or (ending.status == "diverged" and found is None):
            facts = {"status": ending.status, "round": ending.round, "error": ending.error}
            if cell.config.private and ending.kind is not None:
                facts["error"] = f"{ending.kind}, {WITHHELD}"
            elif ending.traceback is not None:
                facts["traceback"] = ending.traceback
            record_end(runs.settings_of(cell.config), folder, facts)
        found = saved_run.read(folder)
    except UsageError as error:  # the folder is damaged or belongs to another run, so it is not changed
        return Outcome(cell, "failed", folder, error=ending.error or str(error))
    return Outcome(cell, ending.status, folder, found.summary, found.history, ending.error)


def _default_jobs(configs: Sequence[RunConfig], threads: int) -> int:
    """Return the default number of processes: as many as the cores allow, or one if a GPU is used."""
    if any(build.device(name).type == "cuda" for name in {config.device for config in configs}):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // threads)


def _write_page(out: Path) -> None:
    """Write a page about the sweep in its folder, unless no cell has anything to show."""
    with suppress(UsageError):
        page.write_sweep(out)
