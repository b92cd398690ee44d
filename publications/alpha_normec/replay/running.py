"""Running cells of the plan: those without a record, in order, for as long as there is time.

Runs live in ordinary run folders, with their checkpoints; a cell that is done leaves its record at once. The time is
looked at between rounds: when it is up, what is running is saved and goes on next time, and nothing new is begun.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from normec.errors import Interrupted, at_least
from normec.experiments.grid import Cell
from normec.experiments.sweep import Event, Outcome, run_cells

from ..figures.protocol import Protocol, at_hand
from . import plan, records
from .plan import Planned
from .records import Record


@dataclass(frozen=True)
class Where:
    """Where runs and their records live."""

    runs: Path
    folder: Path

    @property
    def cells(self) -> Path:
        return self.folder / records.FOLDER


def run(
    base: Protocol,
    names: Sequence[str],
    where: Where,
    together: int = 1,
    jobs: int | None = None,
    limit_seconds: float | None = None,
    report: Callable[[Planned, Record | Outcome], None] = lambda _cell, _what: None,
    on_event: Callable[[Event], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the cells named (all by default) that have no record; True when none is left, False when the time is up.

    `report` hears of every cell that ended: its record, or its outcome where it failed.
    """
    at_least(1, together=together)
    at_hand(base)
    end = clock() + limit_seconds if limit_seconds is not None else None
    tried: set[str] = set()

    def time_is_up() -> bool:
        return end is not None and clock() >= end

    while group := _next(base, names, where, tried):
        if time_is_up():
            return False
        by_name = {cell.config.digest(): cell for cell in group}
        tried |= {cell.name for cell in group}

        def hear(event: Event, by_name: dict[str, Planned] = by_name) -> None:
            if event.outcome is not None:
                _ended(by_name[event.cell.config.digest()], event.outcome, base, where, report, together)
            on_event(event)

        cells = [Cell(cell.config, {"name": cell.name}) for cell in group]
        try:
            run_cells(cells, where.runs, jobs, hear, together=together, stop=time_is_up)
        except Interrupted:
            if not time_is_up():
                raise
            return False
    return True


def waiting(base: Protocol, names: Sequence[str], where: Where) -> list[Planned]:
    """The cells named that are to be run now and have no record: of those run in full, only the ones that did best."""
    cells = plan.plan(base)
    known = records.read(where.cells, cells)
    scores = {name: record["best"]["held_out"] or 0.0 for name, record in known.items()}
    chosen = plan.lengthened(cells, scores)
    asked = plan.named(cells, names)
    return [cell for cell in asked if cell.name not in known and (not cell.chosen or cell.name in {*chosen, *names})]


def _next(base: Protocol, names: Sequence[str], where: Where, tried: set[str]) -> list[Planned]:
    """The next cells that can be handed over at once: alike in precision and length, so that they may take turns."""
    todo = [cell for cell in waiting(base, names, where) if cell.name not in tried]
    _, alike = next(itertools.groupby(todo, key=_kind), (None, iter(())))
    return list(alike)


def _kind(cell: Planned) -> tuple[str, int | None, str]:
    return cell.config.precision, cell.config.epochs, cell.config.model


def _ended(
    cell: Planned,
    outcome: Outcome,
    base: Protocol,
    where: Where,
    report: Callable[[Planned, Record | Outcome], None],
    together: int,
) -> None:
    if outcome.status not in records.DONE:
        report(cell, outcome)
        return
    record = records.made(cell, outcome, base, together)
    records.write(where.cells, record)
    report(cell, record)
