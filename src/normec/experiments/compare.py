"""Comparison of several methods on the same problem, each with its best step size.

A method is given with its own settings, as in ``normec:beta=1,server_norm=false`` or ``mine.py:Mine,tau=0.1``. Each
method runs with every given step size, and the run with the best final training loss, gradient norm or validation
result is shown; test data are never used for this choice. Without step sizes, each method uses its default. With
several seeds, the best run is repeated with the seeds that follow, and the means are shown.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.catalogue import PAPER_METHODS, PRIVATE_METHODS
from ..errors import Diverged, Interrupted, UsageError, at_least
from ..report.comparison_page import folder_prefix
from ..report.result_metrics import BY_COLUMN, values_of
from ..settings.config import RunConfig
from ..settings.validation import make
from ..storage.history import History
from ..system.files import write_atomic
from ..training.callbacks import Callback
from ..training.saved_run import Result
from . import build, methods, runs, server, tuning
from .early_stopping import early_stopping

CRITERIA = {name: name for name in tuning.CRITERIA if name not in tuning.TEST} | {"validation": "validation_loss"}

REPEATS = "seeds"  # the folder of the best runs with other seeds
MEANS = tuple(name for name in BY_COLUMN if name not in ("epsilon", "bytes", "seconds"))  # over seeds


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and its planned runs, one per step size."""

    label: str
    cells: tuple[RunConfig, ...]


@dataclass(frozen=True)
class Outcome:
    """The best run of a candidate, and the final value of the criterion `by` for each step size.

    The value is None if the run diverged, or if it is the only run of a candidate and did not record it.
    """

    label: str
    best: Result | None
    tried: dict[float, float | None]
    by: str
    repeats: tuple[Result, ...] = ()  # the best run with other seeds


def candidates(
    specs: Sequence[str], settings: Mapping[str, Any], step_sizes: Sequence[float] | None = None
) -> list[Candidate]:
    """Return the candidates; `settings` that belong only to some methods are passed to these."""
    found = []
    private = settings.get("private", True)
    for spec in specs or ([name for name in PAPER_METHODS if not private or name in PRIVATE_METHODS]):
        name, given = methods.split_name(spec)
        local = methods.makes_local_steps(name, {**settings, **given})
        unwanted = build.PRIVATE_SETTINGS if private and not given.get("private", True) else ()
        shared = {
            key: value
            for key, value in settings.items()
            if (key not in methods.OF_METHODS or methods.applies(name, key))
            and (local or key not in methods.LOCAL)
            and key not in unwanted
        }
        merged = {**shared, **given, "method": name}
        sizes: Sequence[float | None] = (merged["lr"],) if "lr" in merged else step_sizes or (None,)
        cells = tuple(
            make({**merged, "lr": size if size is not None else methods.step_size(make(merged))}) for size in sizes
        )
        for cell in cells:
            # Refuse invalid settings before the first run.
            built = methods.build(cell, dim=1 if cell.k is None else cell.k)
            methods.local_steps(cell)
            server.check(cell)
            early_stopping(cell)
            build.privacy(cell)
            if cell.private and not math.isfinite(built.bound):
                raise UsageError(f"{name} sends messages without a bound; compare it as {name}:private=false")
        found.append(Candidate(spec, cells))
    for key in settings.keys() & set(methods.OF_METHODS):
        if not any(methods.applies(entry.cells[0].method, key) for entry in found):
            raise UsageError(f"{key} applies to none of the methods compared; leave it out")
    for key in settings.keys() & set(methods.LOCAL):
        if not any(getattr(entry.cells[0], key) is not None for entry in found):
            raise UsageError(f"{key} is for local steps, which none of the methods compared makes; give local_steps")
    labels = [candidate.label for candidate in found]
    if len(set(labels)) < len(labels):
        raise UsageError(f"a method occurs twice in {', '.join(labels)}; give them different settings")
    return found


def run(
    entries: Sequence[Candidate],
    folder: Path,
    watch: Callable[[str], Callback],
    criterion: str = "loss",
    seeds: int = 1,
) -> list[Outcome]:
    """Run every cell in its own folder under `folder`; finished cells are not run again.

    Args:
        entries: The methods.
        folder: The folder of the comparison.
        watch: Makes the callback that shows a run under a label.
        criterion: The criterion for the best step size.
        seeds: How many seeds the best run of each method has, its own included.

    Returns:
        The outcome of each method.
    """
    at_least(1, seeds=seeds)
    column = CRITERIA[criterion]
    if any(len(entry.cells) > 1 and not tuning.records(cell, column) for entry in entries for cell in entry.cells):
        raise tuning.uncovered(column)
    outcomes = []
    for entry in entries:
        tried: dict[float, float | None] = {}
        found: dict[float, Result] = {}
        for cell in entry.cells:
            size = methods.step_size(cell)
            if isinstance(size, str):
                raise UsageError("compare needs step sizes as numbers, got lr='theory', which is for train")
            result = _run(cell, folder / _name(entry, size), watch(f"{entry.label} lr {size:g}"))
            if result is None:
                tried[size] = None
                continue
            found[size] = result
            tried[size] = tuning.value(result.summary, column)
            if tried[size] is None and len(entry.cells) > 1:
                raise tuning.unmeasured(column)
        if len(entry.cells) == 1:  # there is nothing to choose
            best = next(iter(found), None)
        else:
            best = tuning.best({size: [value] for size, value in tried.items()}, column)
        if best is None:
            outcomes.append(Outcome(entry.label, None, tried, column))
            continue
        cell = next(one for one in entry.cells if methods.step_size(one) == best)
        repeats = []
        for seed in range(cell.public_seed + 1, cell.public_seed + seeds):
            path = folder / REPEATS / f"{_name(entry, best)}-seed-{seed}"
            again = make({**cell.model_dump(exclude_unset=True), "seed": seed})
            result = _run(again, path, watch(f"{entry.label} lr {best:g} seed {seed}"))
            if result is None:
                raise UsageError(f"{entry.label} diverged with seed {seed}; compare it with a smaller step size")
            repeats.append(result)
        outcomes.append(Outcome(entry.label, found[best], tried, column, tuple(repeats)))
    return outcomes


def _name(entry: Candidate, size: float) -> str:
    """The name of a run's folder."""
    return f"{folder_prefix(entry.label)}{size:g}"


def _run(cell: RunConfig, folder: Path, callback: Callback) -> Result | None:
    """Return the result of a run; None if it diverged after the first round."""
    try:
        result = runs.execute(cell, folder, [callback])
    except Diverged as error:
        if error.round == 0:
            raise
        return None
    if result.summary["status"] == "interrupted":
        raise Interrupted
    return result


def histories(outcomes: Sequence[Outcome]) -> dict[str, History]:
    return {outcome.label: outcome.best.history for outcome in outcomes if outcome.best is not None}


def write(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, Path]:
    """Write the table as JSON, the picture if there is anything to draw, and the page; returns the first two paths."""
    from ..report import page, pictures

    table, picture = folder / "comparison.json", folder / "comparison.png"
    write_atomic(table, json.dumps([row(outcome) for outcome in outcomes], indent=1) + "\n")
    found = histories(outcomes)
    if found:
        if pictures.measured(list(found.values())):
            pictures.curves(found, picture)
        page.write_comparison(folder)
    return table, picture


def row(outcome: Outcome) -> dict[str, Any]:
    """Return one row of the table: means over the seeds, and their standard deviations where there are several."""
    facts: dict[str, Any] = {
        "method": outcome.label,
        "by": outcome.by,
        "tried": {f"{lr:g}": value for lr, value in outcome.tried.items()},
    }
    if outcome.best is None:
        return {**facts, "status": "diverged"}
    summaries = [one.summary for one in (outcome.best, *outcome.repeats)]
    measured = [values_of(summary) for summary in summaries]
    means, deviations = {}, {}
    for key in MEANS:
        values = [one[key] for one in measured]
        known = None not in values
        means[key] = statistics.fmean(values) if known else None
        if known and len(values) > 1:
            deviations[key] = statistics.stdev(values)
    spent: list[Any] = [one["epsilon"] for one in measured]
    return {
        **facts,
        "status": "finished",
        "lr": outcome.best.summary["config"]["lr"],
        **means,
        "bytes": measured[0]["bytes"],
        "epsilon": None if None in spent else max(spent),
        "seconds": sum(one["timings"]["total"] for one in summaries),
        "seeds": len(summaries),
        "deviations": deviations,
        "folder": str(outcome.best.folder),
    }
