"""Several methods on the same problem, each with the step size that suits it best.

A method is named with its own settings, as in ``normec:beta=1,server_norm=false`` or ``mine.py:Mine,tau=0.1``. Each
runs with every step size offered, and the one with the best final training loss, gradient norm or validation result is
shown: test data has no say. Without step sizes each method takes its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.catalogue import PAPER_METHODS, PRIVATE_METHODS
from ..errors import Diverged, Interrupted, UsageError, one_of
from ..settings import config as configs
from ..settings.config import RunConfig
from ..storage.history import History
from ..system.files import write_atomic
from ..training.callbacks import Callback
from . import methods, runs, server, tuning

CRITERIA = {name: name for name in tuning.CRITERIA if name not in tuning.TEST} | {"validation": "validation_loss"}


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and its runs to be: one a step size."""

    label: str
    cells: tuple[RunConfig, ...]


@dataclass(frozen=True)
class Outcome:
    """The best run of a candidate, and what became of each step size: its final criterion.

    None: the run diverged, or it is a candidate's only one and did not record the criterion.
    """

    label: str
    best: runs.Result | None
    tried: dict[float, float | None]


def candidates(
    specs: Sequence[str], settings: Mapping[str, Any], step_sizes: Sequence[float] | None = None
) -> list[Candidate]:
    """What to run; `settings` that belong to some methods only are passed to those."""
    found = []
    private = settings.get("private", True)
    for spec in specs or ([name for name in PAPER_METHODS if not private or name in PRIVATE_METHODS]):
        name, given = methods.split_name(spec)
        shared = {
            key: value for key, value in settings.items() if key not in methods.SETTINGS or methods.applies(name, key)
        }
        merged = {**shared, **given, "method": name}
        sizes: Sequence[float | None] = (merged["lr"],) if "lr" in merged else step_sizes or (None,)
        cells = tuple(
            configs.make({**merged, "lr": size if size is not None else methods.step_size(configs.make(merged))})
            for size in sizes
        )
        for cell in cells:
            # Refuse bad settings before the first run.
            built = methods.build(cell, dim=1 if cell.k is None else cell.k)
            server.check(cell)
            if cell.private and not math.isfinite(built.bound):
                raise UsageError(f"{name} sends messages without a bound; compare it as {name}:private=false")
        found.append(Candidate(spec, cells))
    for key in settings.keys() & set(methods.SETTINGS):
        if not any(methods.applies(entry.cells[0].method, key) for entry in found):
            raise UsageError(f"{key} applies to none of the methods compared; leave it out")
    labels = [candidate.label for candidate in found]
    if len(set(labels)) < len(labels):
        raise UsageError(f"a method is named twice in {', '.join(labels)}; give each other settings")
    return found


def run(
    entries: Sequence[Candidate], folder: Path, watch: Callable[[str], Callback], criterion: str = "loss"
) -> list[Outcome]:
    """Run every cell in its own folder under `folder`; what is done is not done again."""
    one_of(CRITERIA, criterion=criterion)
    column = CRITERIA[criterion]
    if any(len(entry.cells) > 1 and not tuning.records(cell, column) for entry in entries for cell in entry.cells):
        raise tuning.uncovered(column)
    outcomes = []
    for entry in entries:
        tried: dict[float, float | None] = {}
        found: dict[float, runs.Result] = {}
        for cell in entry.cells:
            size = methods.step_size(cell)
            if isinstance(size, str):
                raise UsageError("compare wants step sizes as numbers; lr='theory' is for train")
            name = f"{re.sub('[:=,/]', '-', entry.label)}-lr-{size:g}"
            try:
                result = runs.execute(cell, folder / name, [watch(f"{entry.label} lr {size:g}")])
            except Diverged as error:
                if error.round == 0:
                    raise
                tried[size] = None
                continue
            if result.summary["status"] == "interrupted":
                raise Interrupted
            found[size] = result
            tried[size] = tuning.value(result.summary, column)
            if tried[size] is None and len(entry.cells) > 1:
                raise tuning.unmeasured(column)
        if len(entry.cells) == 1:  # nothing to choose
            best = next(iter(found), None)
        else:
            best = tuning.best({size: [value] for size, value in tried.items()}, column)
        outcomes.append(Outcome(entry.label, found[best] if best is not None else None, tried))
    return outcomes


def histories(outcomes: Sequence[Outcome]) -> dict[str, History]:
    return {outcome.label: outcome.best.history for outcome in outcomes if outcome.best is not None}


def write(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, Path]:
    """The table as JSON, the picture, if anything to draw was recorded, and the page; returns the first two's paths."""
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
    """One line of the table."""
    facts: dict[str, Any] = {
        "method": outcome.label,
        "tried": {f"{lr:g}": value for lr, value in outcome.tried.items()},
    }
    if outcome.best is None:
        return {**facts, "status": "diverged"}
    final = outcome.best.summary["final"]
    return {
        **facts,
        "status": "finished",
        "lr": outcome.best.summary["config"]["lr"],
        **{key: final.get(key) for key in ("loss", "grad_norm", "memory_error", "test_loss", "accuracy", "bytes")},
        "epsilon": (outcome.best.summary["privacy"] or {}).get("epsilon"),
        "seconds": outcome.best.summary["timings"]["total"],
        "folder": str(outcome.best.folder),
    }
