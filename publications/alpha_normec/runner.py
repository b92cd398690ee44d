"""Run the cells of the plan that have no record yet.

Runs are ordinary run folders with checkpoints, and a finished cell is recorded at once. The time limit is checked
between rounds: when it is reached, running cells are saved and continue the next time, and no other cell is started.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from normec.errors import Interrupted, at_least
from normec.experiments import grid
from normec.experiments.sweep import Event, Outcome, run_cells

from . import plan, records
from .plan import Cell
from .protocol import Protocol, require_data
from .records import Record


@dataclass(frozen=True)
class Folders:
    """The folder of the runs, and the folder of the records and pages.

    With `skip_others`, records of other configurations count as missing and are replaced.
    """

    runs: Path
    results: Path
    skip_others: bool = False


def run(
    base: Protocol,
    names: Sequence[str],
    folders: Folders,
    together: int = 1,
    jobs: int | None = None,
    limit_seconds: float | None = None,
    report: Callable[[Cell, Record | Outcome], None] = lambda _cell, _ended: None,
    on_event: Callable[[Event], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    threads: int | None = None,
) -> bool:
    """Run cells that have no record.

    Args:
        base: The protocol.
        names: Parts or cells; all of them if it is empty.
        folders: Where runs and records are.
        together: Cells that share a GPU.
        jobs: Processes (default: one per core, or one on a GPU).
        limit_seconds: Start no cell after this time, and save the running ones.
        report: Called for every cell that ended, with its record, or with its outcome if it failed.
        on_event: Called for the events of the sweep.
        clock: Seconds since some fixed time.
        threads: Threads per process (default: 1).

    Returns:
        Whether all cells ended; False if the time limit was reached.
    """
    at_least(1, together=together)
    if pending(base, names, folders):
        require_data(base)
    end = clock() + limit_seconds if limit_seconds is not None else None
    tried: set[str] = set()

    def time_is_over() -> bool:
        return end is not None and clock() >= end

    while group := _next(base, names, folders, tried):
        if time_is_over():
            return False
        by_digest = {cell.config.digest(): cell for cell in group}
        tried |= {cell.name for cell in group}

        def on_cell_event(event: Event, by_digest: dict[str, Cell] = by_digest) -> None:
            if event.outcome is not None:
                _ended(by_digest[event.cell.config.digest()], event.outcome, base, folders, report, together)
            on_event(event)

        cells = [grid.Cell(cell.config, {"name": cell.name}) for cell in group]
        try:
            run_cells(cells, folders.runs, jobs, on_cell_event, threads=threads, together=together, stop=time_is_over)
        except Interrupted:
            if not time_is_over():
                raise
            return False
    return True


def pending(base: Protocol, names: Sequence[str], folders: Folders) -> list[Cell]:
    """The named cells that have no record; cells of full length only if they are the best, or named themselves."""
    cells = plan.plan(base)
    known = records.read(folders.results, cells, folders.skip_others)
    scores = {name: record["best"]["held_out"] or 0.0 for name, record in known.items()}
    chosen = {*plan.best_private_cells(cells, scores), *names}
    asked = plan.named(cells, names)
    return [cell for cell in asked if cell.name not in known and (not cell.full_length or cell.name in chosen)]


def _next(base: Protocol, names: Sequence[str], folders: Folders, tried: set[str]) -> list[Cell]:
    """The next cells that can run together: they have the same precision, length and model."""
    todo = [cell for cell in pending(base, names, folders) if cell.name not in tried]
    _, alike = next(itertools.groupby(todo, key=_kind), (None, iter(())))
    return list(alike)


def _kind(cell: Cell) -> tuple[str, int | None, str]:
    return cell.config.precision, cell.config.epochs, cell.config.model


def _ended(
    cell: Cell,
    outcome: Outcome,
    base: Protocol,
    folders: Folders,
    report: Callable[[Cell, Record | Outcome], None],
    together: int,
) -> None:
    if outcome.status not in records.DONE:
        report(cell, outcome)
        return
    record = records.make(cell, outcome, base, together)
    records.write(folders.results, record)
    report(cell, record)
