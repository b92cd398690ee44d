"""The progress of a sweep on stderr: a live table in a terminal, and one line per cell otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .output import printable
from .progress import describe

if TYPE_CHECKING:
    from ..experiments.results import Record
    from ..experiments.sweep import Event


@dataclass
class Running:
    """A running cell.

    Attributes:
        started: When the cell was started.
        first: The round with which it began; None before its first report of a round.
        began: When that report came.
        round: The rounds that are done.
        rounds: The rounds in all, once they are known.
        row: The newest values of the history.
    """

    started: float
    first: int | None = None
    began: float = 0.0
    round: int = 0
    rounds: int | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def rate(self, now: float) -> float | None:
        """Return the rounds per second since the first round."""
        done = self.round - (self.first or 0)
        return done / (now - self.began) if done > 0 and now > self.began else None

    def left(self, now: float) -> float | None:
        """Return the estimated seconds until the cell ends; None during its first rounds."""
        rate = self.rate(now)
        settled = rate and self.rounds is not None and 20 * (self.round - (self.first or 0)) >= self.rounds
        return (self.rounds - self.round) / rate if settled and rate and self.rounds is not None else None


class SweepProgress:
    """The progress of a sweep: counts, running cells, the best setting so far, and the time left."""

    def __init__(self, total: int, by: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.by, self.clock = total, by, clock
        self.running: dict[str, Running] = {}
        self.counts: dict[str, int] = {}
        self.records: list[Record] = []
        self._took: list[float] = []
        self._most = 1

    def update(self, event: Event) -> None:
        now, label = self.clock(), event.cell.label
        if event.outcome is None:
            cell = self.running.setdefault(label, Running(now))
            self._most = max(self._most, len(self.running))
            if event.rounds is not None:
                if cell.first is None:
                    cell.first, cell.began = event.round, now
                cell.round, cell.rounds = event.round, event.rounds
            cell.row |= event.row or {}
            return
        from ..experiments import results

        begun = self.running.pop(label, None)
        outcome = event.outcome
        self.counts[outcome.status] = self.counts.get(outcome.status, 0) + 1
        if outcome.summary:
            self.records.append(results.of(outcome.summary, outcome.folder))
        if begun is not None and outcome.status == "finished":
            self._took.append(now - begun.started)

    @property
    def ended(self) -> int:
        return sum(self.counts.values())

    def left(self) -> float | None:
        """Return the estimated seconds until the sweep ends, from the times of its cells; None if nothing is known."""
        now = self.clock()
        paced = [(cell, cell.left(now)) for cell in self.running.values()]
        usual = self._took or [now - cell.started + left for cell, left in paced if left is not None]
        if not usual:
            return None
        mean = sum(usual) / len(usual)
        ahead = [left if left is not None else max(0.0, mean - (now - cell.started)) for cell, left in paced]
        waiting = self.total - self.ended - len(self.running)
        return max([(mean * waiting + sum(ahead)) / self._most, *ahead])

    def best(self) -> str:
        """Return the best setting so far, by the mean over finished seeds; empty if there is none."""
        from ..errors import UsageError
        from ..experiments import results
        from ..settings.declaration import text_of

        try:
            row = results.best(self.records, self.by) if self.records else None
        except UsageError:
            return ""  # the column was not measured, which the end of the sweep reports
        if row is None:
            return ""
        names = results.varied(self.records)
        where = " ".join(f"{key} {text_of(row[key])}" for key in names if key != "seed" and row[key] is not None)
        return f"{value(self.by, row[self.by])}{' with ' + where if where else ''}"

    def line(self) -> str:
        """Return the progress as one line."""
        parts = [f"{self.ended} of {self.total} done", f"{len(self.running)} running"]
        parts += [f"{self.counts[status]} {status}" for status in ("diverged", "failed") if status in self.counts]
        best, left = self.best(), self.left()
        if best:
            parts.append(f"best so far {best}")
        if left is not None and self.ended < self.total:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


class Lines:
    """Prints a line when a cell ends, and one line for all cells that had ended before."""

    def __init__(self, tally: SweepProgress) -> None:
        self.tally, self._skipped = tally, 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._print_skipped()

    def update(self, event: Event) -> None:
        self.tally.update(event)
        if event.outcome is None:
            return
        if event.outcome.skipped:
            self._skipped += 1
            return
        self._print_skipped()
        left = self.tally.left()
        ahead = f"; {duration(left)} left" if left is not None and self.tally.ended < self.tally.total else ""
        print(
            f"{self.tally.ended}/{self.tally.total}  {ending(event, self.tally.by)}{ahead}", file=sys.stderr, flush=True
        )

    def _print_skipped(self) -> None:
        if self._skipped:
            print(f"{self._skipped} of {self.tally.total} cells had ended before", file=sys.stderr, flush=True)
            self._skipped = 0


class LiveTable:
    """A live table with a line for the sweep and a row for each running cell; failures stay above it."""

    def __init__(self, tally: SweepProgress) -> None:
        from rich.console import Console
        from rich.live import Live

        self.tally = tally
        self._live = Live(
            console=Console(stderr=True), get_renderable=self._table, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, event: Event) -> None:
        self.tally.update(event)
        if event.outcome is not None and event.outcome.status in ("diverged", "failed") and not event.outcome.skipped:
            self._live.console.print(ending(event, self.tally.by), markup=False, highlight=False)

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        now, line = self.tally.clock(), Text(printable(self.tally.line()), style="bold")
        if not self.tally.running:
            return line
        table = Table()
        for name in ("cell", "round", "rounds/s", "now"):
            table.add_column(name, justify="right" if name.startswith("round") else "left", no_wrap=True)
        for label, cell in list(self.tally.running.items()):
            rate = cell.rate(now)
            progress = f"{cell.round}/{cell.rounds}" if cell.rounds is not None else "starting"
            table.add_row(Text(printable(label)), progress, f"{rate:.3g}" if rate else "", describe(cell.row))
        return Group(line, table)


def sweep_display(total: int, by: str, quiet: bool) -> Lines | LiveTable | None:
    """Return the display for this stderr; None if `quiet`."""
    if quiet:
        return None
    tally = SweepProgress(total, by)
    return LiveTable(tally) if sys.stderr.isatty() else Lines(tally)


def ending(event: Event, by: str) -> str:
    """Return one line that says how a cell ended."""
    from ..experiments import tuning

    outcome = event.outcome
    if outcome is None:
        return ""
    found = tuning.value(outcome.summary, by)
    seconds = outcome.summary.get("timings", {}).get("total")
    parts = [outcome.status]
    if outcome.error is not None:
        parts.append(outcome.error)
    if found is not None:
        parts.append(value(by, found))
    if seconds is not None:
        parts.append(f"{seconds:.1f} s")
    return printable(f"{event.cell.label}: {', '.join(parts)}")


def value(column: str, number: float) -> str:
    """Return the value of a column with its name."""
    shown = f"{100 * number:.2f} %" if "accuracy" in column else f"{number:.4g}"
    return f"{column.replace('_', ' ')} {shown}"


def duration(seconds: float) -> str:
    """Return a duration as ``45 s``, ``3:20 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    if whole < 5400:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
