"""normec compare: several methods on the same problem, in one table and one picture."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD…",
            help="normec, clip21:tau=0.1, … (default: the paper's methods; with privacy, those that have a guarantee).",
            show_default=False,
            autocompletion=o.complete_method,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file of shared settings.", show_default=False)
    ] = None,
    set_: o.Set = None,
    lr: Annotated[
        str | None,
        typer.Option(metavar="X[,Y…]", help="Step sizes to try; the best is shown.", show_default=False),
    ] = None,
    by: Annotated[
        str, typer.Option(help="The criterion for the best step size: loss, grad_norm, validation (its loss), …")
    ] = "loss",
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Run each method's best setting with N seeds, and show the means.")
    ] = 1,
    out: o.Out = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    **flags: Any,
) -> int:
    """Run several methods on the same problem.

    A method can have its own settings after a colon: normec:beta=1,server_norm=false or my.py:MyMethod:tau=0.1,lr=0.5.
    Every method runs with each step size, and its best one by --by is shown; without --lr each method uses its default.
    With --seeds the best run is repeated with the seeds that follow, and the table shows means and standard deviations.
    """
    from ..errors import one_of
    from ..experiments import compare as comparison
    from ..settings.validation import load
    from .progress import progress_display

    settings = load(config, o.overrides(set_, flags)).model_dump(exclude_unset=True)
    settings.pop("method", None)
    entries = comparison.candidates(methods or [], settings, _step_sizes(lr))
    if out is None:
        names = "/".join(cell.digest() for entry in entries for cell in entry.cells)
        out = Path("runs") / f"compare-{hashlib.blake2b(names.encode(), digest_size=4).hexdigest()}"
    one_of(comparison.CRITERIA, criterion=by)
    if not methods and not quiet:
        cell, names = entries[0].cells[0], ", ".join(entry.label for entry in entries)
        kind = "private" if cell.private else "non-private"
        print(
            f"comparing {len(entries)} {kind} methods on {cell.data} with {cell.model}: {names}; name some to run only "
            "those",
            file=sys.stderr,
        )
    outcomes = comparison.run(entries, out, lambda label: progress_display(label, quiet), by, seeds)
    table, picture = comparison.write(outcomes, out)
    rows = [comparison.row(outcome) for outcome in outcomes]
    if as_json:
        print(json.dumps({"rows": rows, "table": str(table), "picture": str(picture)}))
    else:
        show_rows(rows)
        print(f"page:    {out / 'report.html'}")
        if picture.exists():
            print(f"picture: {picture}")
        print(f"numbers: {table}")
    return 0


def _step_sizes(text: str | None) -> list[float] | None:
    from ..errors import UsageError, finite

    if text is None:
        return None
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"lr must be numbers separated by commas, got {text!r}") from None
    for size in sizes:
        finite(lr=size)
    return sizes


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table with one line per method."""
    from ..privacy.display import shown_epsilon
    from ..storage.history import NOT_COVERED, uncovered
    from .output import number, percent, show

    percents = {
        "validation_accuracy": ">validation",
        "accuracy": ">accuracy",
        "accuracy_mean_over_clients": ">mean over clients",
    }
    numbers = {"lr": ">lr", "loss": ">loss", "grad_norm": ">‖∇f‖", "memory_error": ">memory error"}
    shown = [key for key in (*numbers, *percents) if any(row.get(key) is not None for row in rows)]
    lines = []
    for row in rows:
        if row["status"] == "diverged":
            lines.append([row["method"], "", "all diverged"])
            continue
        values = [_with_deviation(number if key in numbers else percent, row, key) for key in shown]
        spent = shown_epsilon(row["epsilon"]) or "∞"
        lines.append([row["method"], spent, *values, number(row["bytes"] / 1e6), f"{row['seconds']:.1f}"])
    columns = ["method", ">ε", *({**numbers, **percents}[key] for key in shown), ">MB sent", ">s"]
    show(lines, columns)
    most = max(row.get("seeds", 1) for row in rows)
    if most > 1:
        print(
            f"Means over {most} seeds ± their standard deviation; splits, batches and first models are the same for "
            "all methods."
        )
    if any(uncovered(row) for row in rows):
        print(f"loss, ‖∇f‖ and memory error of the private runs are measured without noise and {NOT_COVERED}.")


def _with_deviation(write: Callable[[float | None], str], row: dict[str, Any], key: str) -> str:
    """Return a mean, with the standard deviation over seeds if there are several."""
    deviation = row.get("deviations", {}).get(key)
    return write(row.get(key)) + (f" ± {write(deviation)}" if deviation is not None else "")
