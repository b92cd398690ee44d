"""What the pages read off the records: means over seeds, the epoch at which the paper's number is passed, fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..figures.arms import Arm
from ..figures.protocol import Protocol
from .plan import Planned, half_of, plan
from .records import Record

NOT_RUN = "not run"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, in percent; the spread is the standard deviation (n − 1), None of a single seed."""

    value: float
    spread: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


def mean(values: Iterable[float | None]) -> Mean | None:
    """Of the values that there are; None of none."""
    held = [value for value in values if value is not None]
    if not held:
        return None
    return Mean(statistics.fmean(held), statistics.stdev(held) if len(held) > 1 else None, len(held))


def text(value: object | None, form: str = "") -> str:
    """A value on a page; "not run" where there is none."""
    return NOT_RUN if value is None else format(value, form) if form else str(value)


class Facts:
    """The plan and the records there are of it."""

    def __init__(self, base: Protocol, records: Mapping[str, Record]) -> None:
        self.base, self.records, self.cells = base, records, plan(base)

    def part(self, name: str) -> list[Planned]:
        """The cells of a part that are run in any case."""
        return [cell for cell in self.cells if cell.part == name and not cell.chosen]

    def picture(self, file: str, title: str, cells: Sequence[Planned]) -> list[str]:
        """A picture on a page; there is none where no cell that it shows has run."""
        return [f"![{title}]({file})", ""] if any(cell.name in self.records for cell in cells) else []

    def of(self, cell: Planned | None) -> Record | None:
        return self.records.get(cell.name) if cell is not None else None

    def find(
        self,
        part: str,
        arm: Arm,
        beta: float,
        lr: float | None = None,
        reading: str = "tables",
        alpha: float | None = None,
        long: bool = False,
    ) -> list[Planned]:
        """The cells at a point, one a seed."""
        return [
            cell
            for cell in self.cells
            if (cell.part, cell.arm.name, cell.beta, cell.reading) == (part, arm.name, beta, reading)
            and (lr is None or cell.lr == lr)
            and (cell.alpha, cell.chosen) == (alpha, long)
        ]

    def in_full(self, noise: str | None = None, arm: Arm | None = None) -> list[Planned]:
        """The private cells that were run in full: of each method its best one, and SN's best at β = 1."""
        return [
            cell
            for cell in self.cells
            if cell.chosen and cell.name in self.records
            if noise in (None, cell.reading) and (arm is None or arm.name == cell.arm.name)
        ]

    def short_run(self, long: Planned) -> Planned:
        """The run of half length by which a cell was chosen; its noise is another draw."""
        return next(cell for cell in self.cells if cell.name == half_of(long))

    def first_half(self, long: Planned) -> float | None:
        """The best accuracy in the first half of a run in full."""
        curve = self.records[long.name]["curve"]
        pairs = zip(curve["epoch"], curve["test"], strict=True)
        return max((value for at, value in pairs if at <= self.base.short_rounds and value is not None), default=None)

    def average(self, cells: Sequence[Planned], kind: str = "final", column: str = "test") -> Mean | None:
        """Final or best accuracy over the seeds that ran; a run that diverged has no final accuracy."""
        known = [record for cell in cells if (record := self.of(cell)) is not None]
        return mean(record[kind][column] for record in known)

    def highest(self, cell: Planned | None, column: str = "test") -> float | None:
        """The best accuracy along a run, also of one that diverged later."""
        record = self.of(cell)
        found: float | None = record["best"][column] if record is not None else None
        return found


def passed(record: Record, paper: float) -> int | None:
    """The first epoch whose test accuracy reaches the paper's final one; None if none does."""
    for epoch, value in zip(record["curve"]["epoch"], record["curve"]["test"], strict=True):
        if value is not None and value >= paper:
            return int(epoch)
    return None


def at_epoch(record: Record, epoch: int) -> float | None:
    """The test accuracy after so many epochs."""
    pairs = dict(zip(record["curve"]["epoch"], record["curve"]["test"], strict=True))
    found: float | None = pairs.get(epoch)
    return found


def rms(differences: Iterable[float]) -> float | None:
    """The root of the mean square; None of nothing."""
    held = list(differences)
    return math.sqrt(statistics.fmean(value * value for value in held)) if held else None


def best_length(pairs: Sequence[tuple[Record, float]]) -> tuple[int, float] | None:
    """The number of epochs at which runs fit the paper's accuracies best, and the RMS there."""
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
