"""normec reproduce: the paper's figures and tables, one by one or all."""

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
    from .figure import Made
    from .protocol import Protocol


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(metavar="FIGURE…", help="fig-params, tab-ef … or all.", show_default=False)
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (a minute), small (a laptop, under an hour) or paper (a GPU).")
    ] = "smoke",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Read the paper otherwise; --list names all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder; a scale has its own folder in it.")] = Path("runs/paper"),
    jobs: Annotated[
        int | None, typer.Option(help="Processes (default: one a core; one on a GPU).", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads a process (default 1).", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the figures and the readings, and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many runs there are, and stop.")] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> int:
    """Make figures and tables of the paper.

    Each leaves a picture (PNG, PDF), its numbers (JSON, CSV) and a table paper / ours / difference. Figures of a scale
    share their runs: what is done is not done again, and the same command goes on after a stop.
    """
    from normec.cli.board import board
    from normec.errors import UsageError
    from normec.experiments import sweep
    from normec.experiments.config import parse_assignment

    from . import figures as lab
    from . import protocol as protocols

    protocol = protocols.make(scale, dict(map(parse_assignment, set_ or [])))
    if list_:
        _list(protocol, as_json)
        return 0
    if not figures:
        raise UsageError("name a figure, or all; `normec reproduce --list` names them")
    chosen = lab.named(figures)
    protocols.at_hand(protocol)
    folder = out / scale
    cells = lab.cells(chosen, protocol)
    if dry_run:
        done = sum(state in ("finished", "diverged") for _, state in sweep.standing(cells, folder))
        print(json.dumps({"runs": len(cells), "done": done}) if as_json else f"{len(cells)} runs, {done} done")
        return 0
    shown = board(len(cells), "validation_accuracy", quiet)
    with shown or nullcontext():
        made, failed = lab.reproduce(chosen, protocol, folder, jobs, shown.hear if shown else None, threads)
    for outcome in failed:
        print(f"failed: {outcome.cell.label}: {outcome.error}", file=sys.stderr)
    if failed:
        print("nothing is drawn; the same command tries what failed again", file=sys.stderr)
        return 1
    _show(made, folder, as_json)
    return 0


def _show(made: list[Made], folder: Path, as_json: bool) -> None:
    if as_json:
        told = [
            {
                "figure": one.figure.name,
                "files": [str(path) for path in one.files],
                "compared": [line.row() for line in one.compared],
            }
            for one in made
        ]
        print(json.dumps({"folder": str(folder), "index": str(folder / "index.md"), "figures": told}))
        return
    from normec.cli.tables import show

    for one in made:
        if one.compared:
            show([line.line() for line in one.compared], ("", ">paper", ">ours", ">difference"), one.figure.name)
        print(f"{one.figure.name}: {one.files[0]}")
    print(f"all of it: {folder / 'index.md'}")


def _list(protocol: Protocol, as_json: bool) -> None:
    from . import figures as lab
    from .protocol import is_reading

    settings = [
        {"name": name, "value": getattr(protocol, name), "open": is_reading(name), "means": field.description}
        for name, field in type(protocol).model_fields.items()
        if name != "scale"
    ]
    named = [{"name": one.name, "shows": one.shows} for one in lab.FIGURES]
    if as_json:
        print(json.dumps({"figures": named, "settings": settings}))
        return
    width = max(len(one["name"]) for one in named)
    for one in named:
        print(f"{one['name']:<{width}}  {one['shows']}")
    for title, wanted in (("What the paper says", False), ("What it leaves open", True)):
        print(f"\n{title} (--set NAME=VALUE):")
        for field in settings:
            if field["open"] is wanted:
                print(f"  {field['name']} = {_text(field['value'])}")
                print(textwrap.indent(textwrap.fill(str(field["means"]), 100), " " * 6))


def _text(value: object) -> str:
    return ", ".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)
