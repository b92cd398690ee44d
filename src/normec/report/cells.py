"""The cells of a sweep: runs that differ only in their seeds, and their mean results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..privacy.display import shown_epsilon
from ..storage.history import NOT_COVERED
from . import formatting
from .result_metrics import IN_ORDER, Metric, values_of
from .run_view import RunView

ENDED = ("finished", "stopped")  # how a run ends that has a result


@dataclass
class Cell:
    """Runs that differ only in their seeds."""

    settings: dict[str, Any]
    runs: list[RunView] = field(default_factory=list)

    @property
    def label(self) -> str:
        parts = [
            str(value) if key == "method" else f"{key} {formatting.number(value)}"
            for key, value in self.settings.items()
        ]
        return ", ".join(parts) or "the only cell"

    @property
    def status(self) -> str:
        found = {run.status for run in self.runs}
        return found.pop() if len(found) == 1 else "mixed"

    def values(self, metric: Metric) -> list[float]:
        """One value for each run that has ended."""
        found = [_value(run, metric) for run in self.runs if run.status in ENDED]
        return [value for value in found if value is not None and math.isfinite(value)]

    def mean(self, metric: Metric) -> float | None:
        """The mean (of ε the largest), or None if a seed has no value: a mean over the others would be biased."""
        values = self.values(metric)
        if len(values) != len(self.runs):
            return None
        return max(values) if metric.column == "epsilon" else statistics.fmean(values)

    def spread(self, metric: Metric) -> float | None:
        """The standard deviation over the seeds; None for fewer than two values."""
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else None


def _value(run: RunView, metric: Metric) -> float | None:
    return run.epsilon if metric.column == "epsilon" else values_of(run.summary | {"final": run.final})[metric.column]


def varied(views: Sequence[RunView]) -> list[str]:
    """The settings other than the seed that differ between runs; the method comes first."""
    from ..settings import config  # it needs pydantic, which pages of single runs do without

    found = [name for name in config.varied([view.settings for view in views]) if name not in ("seed", "diagnostics")]
    return sorted(found, key=lambda name: name != "method")


def grouped(views: Sequence[RunView], names: Sequence[str]) -> list[Cell]:
    """The runs by the settings in `names`, cells and seeds in the order of their values."""
    cells: dict[tuple[Any, ...], Cell] = {}
    for view in views:
        values = tuple(view.settings.get(name) for name in names)
        settings = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        cells.setdefault(values, Cell(settings)).runs.append(view)
    for cell in cells.values():
        cell.runs.sort(key=lambda run: (run.settings.get("seed", 0), run.name))
    return [cells[key] for key in sorted(cells, key=lambda values: [order(value) for value in values])]


def order(value: Any) -> tuple[int, Any]:
    """A sort key: None, then numbers, then words."""
    if value is None:
        return 0, 0
    return (1, value) if isinstance(value, int | float) else (2, str(value))


def measured(cells: Sequence[Cell]) -> list[Metric]:
    """The metrics that some cell has; the labels of those that no guarantee covers say so."""
    uncovered = {name for cell in cells for run in cell.runs for name in run.uncovered}
    return [
        replace(metric, label=f"{metric.label} ({NOT_COVERED})")
        if metric.column.removeprefix("smallest_") in uncovered
        else metric
        for metric in IN_ORDER
        if any(cell.mean(metric) is not None for cell in cells)
    ]


def best(cells: Sequence[Cell], metric: Metric) -> Cell | None:
    """The cell with the best mean; None if no cell has one."""
    known = [cell for cell in cells if cell.mean(metric) is not None]
    if not known:
        return None
    return (max if metric.better == "max" else min)(known, key=lambda cell: cell.mean(metric) or 0.0)


def shown(cell: Cell, metric: Metric) -> str:
    """Mean ± one standard deviation."""
    mean, spread = cell.mean(metric), cell.spread(metric)
    if mean is None:
        return ""
    if metric.column == "epsilon":
        return shown_epsilon(mean)
    if metric.percent:
        return f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if spread is not None else "") + " %"
    return formatting.number(mean, 3) + (f" ± {formatting.number(spread, 2)}" if spread is not None else "")
