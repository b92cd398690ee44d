"""What figures and pages read off the records: accuracies, curves, means over seeds, choices of the step size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .methods import PaperMethod
from .plan import TABLES, Cell, plan, short_name, table_lr
from .protocol import Protocol
from .records import Record

NOT_RUN = "not run"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds in percent, and the standard deviation (n − 1), which a single seed does not have."""

    value: float
    spread: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


@dataclass(frozen=True)
class Curve:
    """A run by communication round: mean training loss over a round, and accuracy in percent at its end."""

    rounds: list[int]
    loss: list[float | None]
    accuracy: list[float | None]


class Results:
    """The plan of a protocol and the records of its cells.

    Args:
        base: The protocol.
        records: Records by the names of their cells; cells may be missing.
    """

    def __init__(self, base: Protocol, records: Mapping[str, Record]) -> None:
        self.base, self.records, self.cells = base, records, plan(base)

    def part(self, name: str) -> list[Cell]:
        """The cells of a part that are always run: without the private ones of full length and other step sizes."""
        usual = [cell for cell in self.cells if cell.part == name and not cell.full_length]
        return [cell for cell in usual if cell.method.private or cell.lr == table_lr(self.base, cell.method, cell.beta)]

    def of(self, cell: Cell | None) -> Record | None:
        """The record of a cell."""
        return self.records.get(cell.name) if cell is not None else None

    def find(
        self,
        part: str,
        method: PaperMethod,
        beta: float,
        lr: float | None = None,
        reading: str = TABLES,
        alpha: float | None = None,
        full_length: bool = False,
    ) -> list[Cell]:
        """The cells at a point of the grids, one per seed; at the paper's step size by default."""
        lr = table_lr(self.base, method, beta) if lr is None else lr
        return [
            cell
            for cell in self.cells
            if (cell.part, cell.method.name, cell.beta, cell.lr) == (part, method.name, beta, lr)
            and (cell.reading, cell.alpha, cell.full_length) == (reading, alpha, full_length)
        ]

    def picture(self, file: str, title: str, cells: Sequence[Cell]) -> list[str]:
        """The Markdown of a picture; nothing if none of its cells has run."""
        return [f"![{title}]({file})", ""] if any(cell.name in self.records for cell in cells) else []

    def in_full(self, noise: str | None = None, method: PaperMethod | None = None) -> list[Cell]:
        """The private cells that were run in full length: the best of each method, and the best with SN at β = 1."""
        return [
            cell
            for cell in self.cells
            if cell.full_length and cell.name in self.records
            if noise in (None, cell.reading) and (method is None or method.name == cell.method.name)
        ]

    def short_run(self, long: Cell) -> Cell:
        """The short run by which a cell of full length was chosen; its noise is drawn independently."""
        return next(cell for cell in self.cells if cell.name == short_name(long))

    def first_half(self, long: Cell) -> float | None:
        """The highest accuracy in the first half of a run of full length."""
        curve = self.records[long.name]["curve"]
        pairs = zip(curve["epoch"], curve["test"], strict=True)
        return max((value for at, value in pairs if at <= self.base.short_rounds and value is not None), default=None)

    def average(self, cells: Sequence[Cell], kind: str = "final", column: str = "test") -> Mean | None:
        """The mean of the final or best accuracy over the cells that ran; a diverged run has no final accuracy."""
        known = [record for cell in cells if (record := self.of(cell)) is not None]
        return mean(record[kind][column] for record in known)

    def final(self, cell: Cell | None, column: str = "test") -> float | None:
        """The accuracy at the end of a run; None if it diverged."""
        record = self.of(cell)
        found: float | None = record["final"][column] if record is not None else None
        return found

    def highest(self, cell: Cell | None, column: str = "test") -> float | None:
        """The highest accuracy along a run, also of one that diverged later."""
        record = self.of(cell)
        found: float | None = record["best"][column] if record is not None else None
        return found

    def curve(self, cell: Cell) -> Curve:
        """The curve of a cell that has a record."""
        found = self.records[cell.name]["curve"]
        return Curve(found["epoch"], found["loss"], found[self.base.column])

    def best(self, cells: Sequence[Cell]) -> Cell | None:
        """The cell with the best final accuracy on the held-out records; a single cell is taken as it is."""
        if len(cells) == 1:
            return cells[0]
        known = [(value, cell) for cell in cells if (value := self.final(cell, "held_out")) is not None]
        return max(known, key=lambda one: one[0])[1] if known else None

    def epsilons(self, cells: Iterable[Cell]) -> list[float]:
        """The exact ε of the private runs that finished, in ascending order."""
        known = [record for cell in cells if (record := self.of(cell)) is not None and record["status"] == "finished"]
        return sorted(record["privacy"]["epsilon"] for record in known if record["privacy"] is not None)


def mean(values: Iterable[float | None]) -> Mean | None:
    """The mean of the known values; None if there are none."""
    held = [value for value in values if value is not None]
    if not held:
        return None
    return Mean(statistics.fmean(held), statistics.stdev(held) if len(held) > 1 else None, len(held))


def text(value: object | None, form: str = "") -> str:
    """A value on a page, or "not run"."""
    return NOT_RUN if value is None else format(value, form) if form else str(value)


def passed(record: Record, paper: float) -> int | None:
    """The first epoch at which the test accuracy reaches the paper's final accuracy."""
    for epoch, value in zip(record["curve"]["epoch"], record["curve"]["test"], strict=True):
        if value is not None and value >= paper:
            return int(epoch)
    return None


def at_epoch(record: Record, epoch: int) -> float | None:
    """The test accuracy after an epoch."""
    pairs = dict(zip(record["curve"]["epoch"], record["curve"]["test"], strict=True))
    found: float | None = pairs.get(epoch)
    return found


def rms(differences: Iterable[float]) -> float | None:
    """The root mean square; None if there are no differences."""
    held = list(differences)
    return math.sqrt(statistics.fmean(value * value for value in held)) if held else None


def best_length(pairs: Sequence[tuple[Record, float]]) -> tuple[int, float] | None:
    """The number of epochs after which the runs are closest to the paper's accuracies, and the RMS there."""
    if not pairs:
        return None
    epochs = sorted(set.intersection(*(set(record["curve"]["epoch"]) for record, _ in pairs)) - {0})
    fits = []
    for epoch in epochs:
        away = [value - paper for record, paper in pairs if (value := at_epoch(record, epoch)) is not None]
        if len(away) == len(pairs):
            fits.append((rms(away) or 0.0, epoch))
    if not fits:
        return None
    fit, epoch = min(fits)
    return epoch, fit
