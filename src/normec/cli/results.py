"""normec results: the runs in some folders as one tidy table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..report.result_metrics import BY_COLUMN, METRICS
from . import options as o
from .output import printable

# Settings that the printed table shows first, if more differ than fit into it.
FIRST = (
    *("data", "model", "clients", "split", "method", "unit", "trust", "lr", "alpha", "beta", "tau", "decay"),
    *("rounds", "batch_size", "local_steps", "server_optimizer", "noise_schedule"),
)
MOST_SETTINGS = 6
NOT_SETTINGS = ("tuned", "by", "tried", "edge", "folder", "error", "status", "round", "rounds")  # columns of rows


def results(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER…", help="Folders of runs, sweeps or comparisons (default: runs).", show_default=False
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="table, markdown, csv, json or parquet.")] = "table",
    each: Annotated[
        bool, typer.Option("--each", help="One row per run, instead of mean and spread over seeds.")
    ] = False,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING[,…]",
            help="Show the best value of a setting, such as lr, in each cell; none: all (default: as in the sweep).",
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="The column that decides (default: validation_accuracy).", show_default=False)
    ] = None,
    on_test: Annotated[
        bool, typer.Option("--on-test", help="Allow test data to decide, to reproduce a paper that did.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write to a file.", show_default=False)] = None,
    as_json: o.Json = False,
) -> int:
    """Show the runs in some folders as a table. A row is a setting, with mean and spread over seeds."""
    from ..errors import UsageError, one_of
    from ..experiments import export, tuning
    from ..experiments import results as run_results
    from ..system.files import write_atomic

    folders = folders or [Path("runs")]
    format = "json" if as_json else format
    one_of(export.FORMATS, format=format)
    if format == "parquet" and out is None:
        raise UsageError("parquet cannot be printed; give --out FILE")
    if out is not None and format == "table":
        raise UsageError("--out needs --format markdown, csv, json or parquet")
    if each and (tune or by):
        raise UsageError("--each shows every run; leave --tune and --by out")
    names, column, allowed = _tuning(folders, tune, by, on_test)
    found = run_results.collect(folders)
    for line in found.notes:
        print(printable(line), file=sys.stderr)
    if not found.records:
        raise UsageError("none of these runs can be read")
    if each:
        rows = run_results.each(found.records)
    elif names:
        rows = run_results.tuned(found.records, names, column or tuning.DEFAULT, allowed)
    else:
        rows = run_results.over_seeds(found.records)
    if out is not None:
        if format == "parquet":
            export.write_parquet(rows, out)
        else:
            write_atomic(out, _text(rows, format))
        print(f"{len(rows)} rows: {out}")
    elif format == "table":
        show_rows(rows)
        for line in notes_on(rows):
            print(line)
    else:
        print(_text(rows, format), end="")
    return 0


def _text(rows: list[dict[str, Any]], format: str) -> str:
    """Return the rows as text: the printed table in Markdown, or everything as CSV or JSON."""
    from ..experiments import export

    if format == "markdown":
        heads, lines, _ = _table(rows)
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        return "\n".join(export.to_markdown([head.removeprefix(">") for head in heads], cells)) + "\n"
    return export.to_csv(rows) if format == "csv" else export.to_json(rows)


def _tuning(folders: list[Path], tune: str | None, by: str | None, on_test: bool) -> tuple[list[str], str | None, bool]:
    """Return what to tune and by which column: as given, or from the sweep if only one is shown."""
    from ..errors import UsageError
    from ..experiments import grid

    if tune is not None:
        names = [] if tune == "none" else [name.strip() for name in tune.split(",")]
        if by is not None and not names:
            raise UsageError("--by needs a setting to tune; give --tune SETTING")
        return names, by, on_test
    if len(folders) == 1 and (folders[0] / "sweep.toml").exists():
        own = grid.load(folders[0] / "sweep.toml", checked=False)
        return list(own.tune), by or own.by, on_test or own.on_test
    if by is not None:
        raise UsageError("--by is the column that decides; give the setting to choose with --tune")
    return [], None, on_test


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table, and say which settings are left out.

    Columns that are empty or the same in all rows are not shown, except for the method and the tuned settings.
    """
    from .output import show

    heads, lines, left_out = _table(rows)
    show(lines, heads)
    if left_out:
        print(f"Not shown: {', '.join(left_out)}, which differ too; --format csv has all settings.")


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the headings and the lines of the printed table, and the settings for which it has no room."""
    from ..experiments.results import STATES

    names = [name for name in rows[0] if name not in (*NOT_SETTINGS, *STATES) and not _is_metric(name)]
    always = ("method", *rows[0].get("tuned", "").split(", "))
    names = [name for name in names if name in always or len({row[name] for row in rows}) > 1]
    left_out = _left_out(names, rows)
    names = [name for name in names if name not in left_out]
    counts = [name for name in STATES if any(row.get(name) for row in rows)]
    by = rows[0].get("by")
    wanted = [metric.column for metric in METRICS if metric.usual or metric.column == by]
    metrics = [name for name in wanted if any(row[name] is not None for row in rows)]
    more = [name for name in ("status", "edge") if any(row.get(name) for row in rows)]
    heads = [
        *names,
        *(">seeds" if name == "finished" else f">{name}" for name in counts),
        *(f">{BY_COLUMN[name].heading}" for name in metrics),
        *more,
    ]
    lines = [
        [
            *(_setting(row[name]) for name in names),
            *(str(row[name]) for name in counts),
            *(_measured(row, name) for name in metrics),
            *(str(row[name]) for name in more),
        ]
        for row in rows
    ]
    return heads, lines, left_out


def _left_out(names: list[str], rows: list[dict[str, Any]]) -> list[str]:
    """Return the settings for which the table has no room; those without two different values are left out first."""

    def rank(name: str) -> tuple[bool, bool, int]:
        values = {row[name] for row in rows} - {None}
        place = FIRST.index(name) if name in FIRST else len(FIRST)
        return name != "method", len(values) < 2, place

    kept = sorted(names, key=rank)[:MOST_SETTINGS]
    return [name for name in names if name not in kept]


def notes_on(rows: list[dict[str, Any]]) -> list[str]:
    """Return notes about the table."""
    from ..storage.history import NOT_COVERED, uncovered

    lines = []
    if any(uncovered(row) for row in rows):
        lines.append(f"Losses and norms of private runs are measured without noise: they are {NOT_COVERED}.")
    if not any("by" in row for row in rows):
        return lines
    lines += [f"Chosen by {rows[0]['by'].replace('_', ' ')}, mean over seeds; ± is the standard deviation over seeds."]
    if any(row["edge"] for row in rows):
        lines.append("edge: the best value is the smallest or largest one; a wider grid may find a better one.")
    if any(row["epsilon"] is not None for row in rows):
        lines.append("ε holds for one run; choosing among several runs by the same clients' data is not covered.")
    return lines


def _is_metric(name: str) -> bool:
    return name.removesuffix("_spread") in BY_COLUMN


def _setting(value: Any) -> str:
    from ..settings.declaration import text_of

    return "" if value is None else text_of(value)


def _measured(row: dict[str, Any], name: str) -> str:
    from ..privacy.display import shown_epsilon

    mean, spread = row[name], row.get(f"{name}_spread")
    if mean is None:
        return ""
    if BY_COLUMN[name].percent:
        return f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "") + " %"
    if name == "seconds":
        return f"{mean:.1f}"
    if name == "epsilon":
        return shown_epsilon(mean)
    return f"{mean:.3g}" + (f" ± {spread:.1g}" if spread else "")
