"""The commands: list, run, collect, figures, pages."""

from __future__ import annotations

import json
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normec.cli import options as o

if TYPE_CHECKING:
    from normec.experiments.sweep import Outcome

    from .figures.figure import Made
    from .plan import Cell
    from .protocol import Protocol
    from .records import Record
    from .runner import Folders

app = typer.Typer(
    name="python -m publications.alpha_normec",
    help="Reproduce the experiments of the α-NormEC paper.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PART|CELL]…", help="tables, readings, private, alpha, or cells.", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the records and pages (default: committed at paper scale, else RUNS).", show_default=False
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(help="Folder of the runs (default: runs/alpha_normec/SCALE).", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the protocol; `figures --list` names all."),
]
Scale = Annotated[str, typer.Option(help="smoke (two minutes), small (a laptop, under an hour) or paper (a GPU).")]
Jobs = Annotated[int | None, typer.Option(help="Processes (default: one per core, one on a GPU).", show_default=False)]
COMMITTED = Path(__file__).parent


@app.command("list")
def list_(
    names: Names = None, folder: Folder = None, scale: Scale = "paper", set_: Set = None, as_json: o.Json = False
) -> None:
    """List the cells, with the paper's accuracy and their state."""
    from normec.cli.output import show

    from . import plan, records, runner

    base, folders = _base(scale, set_), _folders(scale, set_, folder, None)
    cells = plan.plan(base)
    known = records.read(folders.results, cells)
    due = {cell.name for cell in runner.pending(base, names or [], folders)}
    rows = []
    for cell in plan.named(cells, names or []):
        state = known[cell.name]["status"] if cell.name in known else "pending" if cell.name in due else "only if best"
        rows.append({"name": cell.name, "part": cell.part, "state": state, "paper": cell.paper})
        if as_json:
            rows[-1]["config"] = cell.config.identity_settings()
    if as_json:
        print(json.dumps(rows))
        return
    shown = [(str(row["name"]), f"{row['paper']:.2f}" if row["paper"] else "", str(row["state"])) for row in rows]
    show(shown, ("cell", ">paper, %", "state"))
    done = sum(row["name"] in known for row in rows)
    print(f"{len(rows)} cells: {done} have a record, {len(due)} are pending")


@app.command("run")
def run(
    names: Names = None,
    folder: Folder = None,
    runs: Runs = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Start no cell after this time, and save the running ones.", show_default=False),
    ] = None,
    together: Annotated[int, typer.Option(help="Cells that take turns on a GPU, round by round.")] = 1,
    jobs: Jobs = None,
    scale: Scale = "paper",
    set_: Set = None,
    quiet: o.Quiet = False,
) -> int:
    """Run the cells that have no record; the same command continues after an interruption.

    The exit code is 1 if a cell failed; it is tried again the next time.
    """
    from . import runner

    base, folders = _base(scale, set_), _folders(scale, set_, folder, runs)
    done, failed = _run(base, names or [], folders, quiet, jobs, limit_seconds, together)
    left = len(runner.pending(base, names or [], folders))
    print(f"{'done' if done else 'time limit reached'}: {left} cells are pending; records are in {folders.results}")
    return 1 if failed else 0


@app.command("collect")
def collect(
    source: Annotated[Path, typer.Argument(metavar="FILE.tgz|FOLDER", help="Records from another machine.")],
    folder: Folder = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace records that have other numbers.")] = False,
    scale: Scale = "paper",
    set_: Set = None,
) -> None:
    """Add records from another machine; all are refused if one of them does not fit the plan."""
    from . import plan, records

    folders = _folders(scale, set_, folder, None)
    new = records.collect(source, folders.results, plan.plan(_base(scale, set_)), replace)
    print(f"{len(new)} new records" + "".join(f"\n  {name}" for name in new))


@app.command("figures")
def figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="FIGURE…", help="fig-params, tab-ef … or all.", show_default=False)
    ] = None,
    scale: Scale = "smoke",
    set_: Set = None,
    folder: Folder = None,
    runs: Runs = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures (default: RUNS/figures).", show_default=False)
    ] = None,
    jobs: Jobs = None,
    threads: Annotated[int | None, typer.Option(help="Threads per process (default: 1).", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and the settings, and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the number of cells, and stop.")] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> int:
    """Draw figures and tables of the paper, after running the cells that have no record.

    Each figure is a picture (PNG, PDF), its numbers (JSON, CSV) and a table paper / ours / difference. Figures share
    their cells, and the same command continues after an interruption.
    """
    from dataclasses import replace

    from normec import UsageError

    from . import plan, records, runner
    from .figures import catalogue
    from .results import Results

    base = _base(scale, set_)
    if list_:
        _list_figures(base, as_json)
        return 0
    if not names:
        raise UsageError("name a figure, or all; `python -m publications.alpha_normec figures --list` lists them")
    chosen = catalogue.named(names)
    folders = _folders(scale, set_, folder, runs)
    folders = replace(folders, skip_others=folders.results != COMMITTED)
    cells = catalogue.cells(chosen, base)
    wanted = [cell.name for cell in cells]
    done = len(cells) - len(runner.pending(base, wanted, folders))
    if dry_run:
        print(json.dumps({"cells": len(cells), "done": done}) if as_json else f"{len(cells)} cells, {done} done")
        return 0
    if not quiet and done:
        print(f"{done} of {len(cells)} cells have a record", file=sys.stderr)
    _, failed = _run(base, wanted, folders, quiet, jobs, threads=threads)
    if failed:
        print("no figure was drawn; the same command tries the failed cells again", file=sys.stderr)
        return 1
    out = out if out is not None else folders.runs / "figures"
    results = Results(base, records.read(folders.results, plan.plan(base), folders.skip_others))
    without = [cell for cell in cells if not any(loss is not None for loss in results.curve(cell).loss)]
    if without and not quiet:
        print(f"{len(without)} of {len(cells)} records have no training loss; figures leave it out", file=sys.stderr)
    _show_figures(catalogue.draw(chosen, results, out), out, as_json)
    return 0


@app.command("pages")
def pages(
    folder: Folder = None,
    pictures: Annotated[bool, typer.Option(help="Draw the pictures as well.")] = True,
    scale: Scale = "paper",
    set_: Set = None,
) -> None:
    """Write the pages, tables and pictures from the records."""
    from .pages.writer import write

    for path in write(_base(scale, set_), _folders(scale, set_, folder, None).results, pictures):
        print(path)


def _base(scale: str, assignments: list[str] | None) -> Protocol:
    from normec.settings.assignments import parse_assignment

    from . import protocol

    return protocol.make(scale, dict(map(parse_assignment, assignments or [])))


def _folders(scale: str, assignments: list[str] | None, folder: Path | None, runs: Path | None) -> Folders:
    """The folders that were given, or the default ones: the committed records belong to the unchanged protocol."""
    from .runner import Folders

    usual = Path("runs/alpha_normec") / scale
    committed = scale == "paper" and not assignments
    return Folders(runs or usual, folder or (COMMITTED if committed else runs or usual))


def _run(
    base: Protocol,
    names: list[str],
    folders: Folders,
    quiet: bool,
    jobs: int | None,
    limit_seconds: float | None = None,
    together: int = 1,
    threads: int | None = None,
) -> tuple[bool, list[str]]:
    """Run cells with a progress display; returns whether all ended, and the names of those that failed."""
    from normec.cli.sweep_progress import sweep_display
    from normec.experiments.sweep import Outcome

    from . import runner

    failed = []

    def report(cell: Cell, ended: Record | Outcome) -> None:
        if isinstance(ended, Outcome):
            failed.append(cell.name)
            print(f"{cell.name}: {ended.status}: {ended.error}", file=sys.stderr, flush=True)

    count = len(runner.pending(base, names, folders))
    shown = sweep_display(count, "validation_accuracy", quiet) if count else None
    with shown or nullcontext():
        on_event = shown.update if shown else (lambda _: None)
        done = runner.run(
            base, names, folders, together, jobs, limit_seconds, report, on_event=on_event, threads=threads
        )
    return done, failed


def _show_figures(made: list[Made], folder: Path, as_json: bool) -> None:
    if as_json:
        content = [
            {
                "figure": one.figure.name,
                "files": [str(path) for path in one.files],
                "compared": [line.row() for line in one.compared],
            }
            for one in made
        ]
        print(json.dumps({"folder": str(folder), "index": str(folder / "index.md"), "figures": content}))
        return
    from normec.cli.output import show

    for one in made:
        if one.compared:
            show([line.line() for line in one.compared], ("", ">paper", ">ours", ">difference"), one.figure.name)
        print(f"{one.figure.name}: {one.files[0]}")
    print(f"index: {folder / 'index.md'}")


def _list_figures(protocol: Protocol, as_json: bool) -> None:
    from .figures.catalogue import FIGURES
    from .protocol import origin

    settings = [
        {"name": name, "value": getattr(protocol, name), "open": origin(name) == "open", "means": field.description}
        for name, field in type(protocol).model_fields.items()
        if name != "scale"
    ]
    named = [{"name": one.name, "shows": one.shows} for one in FIGURES]
    if as_json:
        print(json.dumps({"figures": named, "settings": settings}))
        return
    width = max(len(one["name"]) for one in named)
    for one in named:
        print(f"{one['name']:<{width}}  {one['shows']}")
    titles = {
        "paper": "Stated by the paper",
        "open": "Left open by the paper",
        "reproduction": "Of the reproduction",
    }
    for wanted, title in titles.items():
        print(f"\n{title} (--set NAME=VALUE):")
        for field in settings:
            if origin(str(field["name"])) == wanted:
                print(f"  {field['name']} = {_text(field['value'])}")
                print(textwrap.indent(textwrap.fill(str(field["means"]), 100), " " * 6))


def _text(value: object) -> str:
    return ", ".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)
