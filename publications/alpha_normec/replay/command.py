"""normec replay: the paper's cells on its own data, run, recorded, and set beside its numbers."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normec.cli import options as o

if TYPE_CHECKING:
    from ..figures.protocol import Protocol
    from .running import Where

app = typer.Typer(help="The paper's experiments again, on real CIFAR-10, beside its numbers.", no_args_is_help=True)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PART|CELL]…", help="tables, readings, private, alpha, or cells.", show_default=False),
]
Folder = Annotated[Path, typer.Option(help="Folder of the records and pages.")]
Runs = Annotated[Path, typer.Option(help="Folder of the runs and their checkpoints.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another protocol; for trying things out.")
]
Scale = Annotated[str, typer.Option(help="paper, or smoke to try the command on digits.")]
FOLDER, RUNS = Path(__file__).parents[1] / "records", Path("runs/replay")


@app.command("list")
def list_(
    names: Names = None,
    folder: Folder = FOLDER,
    scale: Scale = "paper",
    set_: Set = None,
    as_json: o.Json = False,
) -> None:
    """Every cell by name, with the paper's accuracy and where it stands."""
    from normec.cli.tables import show

    from . import plan, records
    from .running import waiting

    base, where = _base(scale, set_), _where(folder, RUNS)
    cells = plan.plan(base)
    known = records.read(where.cells, cells)
    due = {cell.name for cell in waiting(base, names or [], where)}
    rows = []
    for cell in plan.named(cells, names or []):
        state = known[cell.name]["status"] if cell.name in known else "waiting" if cell.name in due else "if it is best"
        rows.append({"name": cell.name, "part": cell.part, "state": state, "paper": cell.paper})
        if as_json:
            rows[-1]["config"] = cell.config.known_by()
    if as_json:
        print(json.dumps(rows))
        return
    shown = [(str(row["name"]), f"{row['paper']:.2f}" if row["paper"] else "", str(row["state"])) for row in rows]
    show(shown, ("cell", ">paper, %", "state"))
    done = sum(row["name"] in known for row in rows)
    print(f"{len(rows)} cells: {done} have a record, {len(due)} wait")


@app.command("run")
def run(
    names: Names = None,
    folder: Folder = FOLDER,
    runs: Runs = RUNS,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Begin nothing after so long, and save what runs.", show_default=False)
    ] = None,
    together: Annotated[int, typer.Option(help="On a GPU: cells at a time, a round each in turn.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(help="Processes (default: one a core; one on a GPU).", show_default=False)
    ] = None,
    scale: Scale = "paper",
    set_: Set = None,
    quiet: o.Quiet = False,
) -> int:
    """Run the cells that have no record yet; the same command goes on where it stopped.

    Exit code 1 if a cell failed; it is tried again next time.
    """
    from normec.cli.board import board
    from normec.experiments.sweep import Outcome

    from . import running
    from .plan import Planned
    from .records import Record

    failed = []

    def report(cell: Planned, what: Record | Outcome) -> None:
        if isinstance(what, Outcome):
            failed.append(cell.name)
            print(f"{cell.name}: {what.status}: {what.error}", file=sys.stderr, flush=True)

    base, where = _base(scale, set_), _where(folder, runs)
    shown = board(len(running.waiting(base, names or [], where)), "validation_accuracy", quiet)
    with shown or nullcontext():
        hear = shown.hear if shown else (lambda _: None)
        done = running.run(base, names or [], where, together, jobs, limit_seconds, report, hear)
    left = len(running.waiting(base, names or [], where))
    print(f"{'done' if done else 'the time is up'}: {left} cells wait; records are in {where.cells}")
    return 1 if failed else 0


@app.command("collect")
def collect(
    source: Annotated[Path, typer.Argument(metavar="FILE.tgz|FOLDER", help="Records made elsewhere.")],
    folder: Folder = FOLDER,
    replace: Annotated[bool, typer.Option("--replace", help="Take records that are here with other numbers.")] = False,
    scale: Scale = "paper",
    set_: Set = None,
) -> None:
    """Take in records from another machine; one that does not fit the plan refuses the lot."""
    from . import plan
    from .collect import collect

    new = collect(source, folder, plan.plan(_base(scale, set_)), replace)
    print(f"{len(new)} new records" + "".join(f"\n  {name}" for name in new))


@app.command("pages")
def pages(
    folder: Folder = FOLDER,
    readme: Annotated[
        Path | None, typer.Option(help="The README whose results are made from the records.", show_default=False)
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Draw the pictures too.")] = True,
    scale: Scale = "paper",
    set_: Set = None,
) -> None:
    """Make the pages, tables and pictures from the records."""
    from .pages import write

    for path in write(_base(scale, set_), folder, readme, pictures):
        print(path)


def _base(scale: str, assignments: list[str] | None) -> Protocol:
    from normec.experiments.config import parse_assignment

    from ..figures import protocol
    from .plan import PRECISION

    return protocol.make(scale, {"precision": PRECISION, **dict(map(parse_assignment, assignments or []))})


def _where(folder: Path, runs: Path) -> Where:
    from .running import Where

    return Where(runs, folder)
