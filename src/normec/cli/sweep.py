"""normec sweep: all runs of a grid, from one file."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .output import printable

if TYPE_CHECKING:
    from ..experiments.grid import Grid
    from ..experiments.sweep import Outcome


def sweep(
    grid: Annotated[Path, typer.Argument(help="A TOML file: shared settings, [grid], [[cases]], seeds, tune, by.")],
    set_: o.Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep (default: runs/NAME).", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of processes (default: one per core; one on a GPU).", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads per process (default: 1).", show_default=False)] = None,
    together: Annotated[int, typer.Option(help="Cells that a process gets at a time.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: its address, auto or local.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and their states, and exit.")] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> int:
    """Run every cell of a grid.

    Finished cells are skipped, and interrupted cells continue. A cell that diverges is recorded with its round, and the
    others run. The same command continues after a stop. The exit code is 1 if a cell failed; the next sweep tries it
    again.
    """
    from ..experiments import grid as grids
    from ..experiments import sweep as sweeps
    from ..settings.assignments import parse_assignment
    from .sweep_progress import sweep_display

    tables = grids.read(grid)
    text = grid.read_text(encoding="utf-8")
    if set_:
        import tomli_w

        tables |= dict(map(parse_assignment, set_))
        text = tomli_w.dumps(tables)
    found = grids.expand(tables)
    out = Path("runs") / grid.stem if out is None else out
    if dry_run:
        _list(found, sweeps.cell_states(found.cells, out), as_json)
        return 0
    shown = sweep_display(len(found.cells), found.by, quiet)
    with shown or nullcontext():
        outcomes = sweeps.sweep(
            found, text, out, jobs, shown.update if shown else None, threads=threads, together=together, ray=ray
        )
    _show(found, outcomes, out, as_json)
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _list(grid: Grid, states: list[tuple[Path, str]], as_json: bool) -> None:
    rows = [
        {**cell.settings, "state": state, "folder": str(folder)}
        for cell, (folder, state) in zip(grid.cells, states, strict=True)
    ]
    if as_json:
        print(json.dumps(rows))
        return
    from .output import show

    show(
        [(cell.label, str(row["state"]), str(row["folder"])) for cell, row in zip(grid.cells, rows, strict=True)],
        ("cell", "state", "folder"),
    )
    done = sum(row["state"] in ("finished", "diverged") for row in rows)
    print(f"{len(rows)} cells, {done} done")


def _show(grid: Grid, outcomes: list[Outcome], out: Path, as_json: bool) -> None:
    from ..experiments import results
    from .results import notes_on, show_rows

    records = [results.of(outcome.summary, outcome.folder) for outcome in outcomes if outcome.summary]
    rows: list[dict[str, Any]] = []
    if records:
        rows = results.tuned(records, grid.tune, grid.by, grid.on_test) if grid.tune else results.over_seeds(records)
    if as_json:
        cells = [
            {
                **outcome.cell.settings,
                "status": outcome.status,
                "round": outcome.summary.get("round"),
                "error": outcome.error,
                "skipped": outcome.skipped,
                "folder": str(outcome.folder),
            }
            for outcome in outcomes
        ]
        print(json.dumps({"folder": str(out), "cells": cells, "rows": rows}))
        return
    if rows:
        show_rows(rows)
    for outcome in outcomes:
        if outcome.status in ("diverged", "failed"):
            print(printable(f"{outcome.status}: {outcome.cell.label}: {outcome.error}"))
    for line in notes_on(rows):
        print(line)
    print(f"folder: {out}\ntables: normec results {out} --format csv\npage: {out / 'report.html'}")
