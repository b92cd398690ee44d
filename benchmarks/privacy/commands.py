"""The commands: list, run, page, collect."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normec.cli import options as o

if TYPE_CHECKING:
    from .studies import Study

FOLDER = Path(__file__).parent
HEART = "heart-disease"  # four hospitals, with a protocol and a page of its own
app = typer.Typer(
    name="python -m benchmarks.privacy",
    help="Compare methods under the same privacy guarantee.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Option("--out", help="Folder of README.md and records/.")]


@app.command("list")
def list_studies(out: Folder = FOLDER, as_json: o.Json = False) -> None:
    """List the studies, how many of their cells have run, and how long the others take."""
    from . import heart, page, records, runner
    from .studies import STUDIES

    rows: list[dict[str, Any]] = []
    for name, study in STUDIES.items():
        done = {records.cell_of(one) for one in records.read(study, out / page.RECORDS)}
        left = sum(runner.estimate(study, cell) for cell in study.cells() if cell not in done)
        rows.append(
            {"study": name, "shows": study.shows, "cells": len(study.cells()), "run": len(done), "seconds_left": left}
        )
    heart_cells = {*heart.CONDITIONS, *heart.OTHERS}
    heart_run = {heart.condition_of(one) for one in heart.read(out / page.RECORDS / heart.RECORD.name)["conditions"]}
    heart_left = "finished" if heart_run >= heart_cells else "a few minutes left"
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        left_text = f"{runner.duration(row['seconds_left'])} left" if row["seconds_left"] else "finished"
        print(f"{row['study']:25} {row['run']:4} of {row['cells']:4} cells   {left_text:26} {row['shows']}")
    print(f"{HEART:25} {len(heart_run):4} of {len(heart_cells):4} cells   {heart_left:26} {heart.SHOWS}")


@app.command("run")
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CONDITION…",
            help=f"STUDY, STUDY/SPLIT, STUDY/SPLIT/EPSILON or STUDY/SPLIT/EPSILON/METHOD; FILE.py:NAME as STUDY "
            f"for a study of your own; {HEART}; or all.",
        ),
    ],
    out: Folder = FOLDER,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Start no run after this time.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    together: Annotated[int, typer.Option(help="Runs that take turns on a GPU, round by round.")] = 1,
    processes: Annotated[int, typer.Option(help="Cells that run at the same time, one process each.")] = 1,
) -> None:
    """Run conditions; the same command continues after an interruption."""
    from normec.errors import at_least

    from . import page, runner, studies

    at_least(1, processes=processes, together=together)
    report = partial(print, file=sys.stderr, flush=True)
    if HEART in names or "all" in names:
        _heart(processes, report, out)
    own: dict[str, Study] = {}
    conditions = []
    for name in names:
        in_file = re.match(r"(?P<study>.+?\.py:\w+)(?P<rest>/.*)?$", name)
        if in_file is not None:
            study = _study_in_file(in_file["study"])
            own[study.name] = study
            conditions.append(study.name + (in_file["rest"] or ""))
        elif name != HEART:
            conditions.append(name)
    known = {**studies.STUDIES, **own}
    cells = studies.chosen(conditions, known)
    if not cells:
        return
    done = runner.run(cells, out / page.RECORDS, limit_seconds, device, report, together, processes, known)
    for name in own:
        print("\n".join(page.of_study(own[name], out / page.RECORDS)))
    print("done" if done else "time limit reached; the same command continues")


@app.command("page")
def page_command(
    out: Folder = FOLDER, picture: Annotated[bool, typer.Option(help="Draw the picture as well.")] = True
) -> None:
    """Write README.md, studies.md, results.csv and the picture from the records, and the page of the hospitals."""
    from normec import UsageError

    from . import heart, page
    from .studies import STUDIES

    if not any((out / page.RECORDS / f"{name}.jsonl").exists() for name in STUDIES):
        raise UsageError(
            f"{out / page.RECORDS} has no records of the studies that this page shows; the table of a study of your "
            "own is printed by run FILE.py:NAME"
        )
    written = page.write(out, picture and find_spec("matplotlib") is not None)
    hospitals = heart.write_page(out / page.RECORDS, _heart_page(out))
    print("\n".join(map(str, [*written, *([hospitals] if hospitals is not None else [])])))


@app.command("collect")
def collect(
    source: Annotated[Path, typer.Argument(metavar="FILE.tgz|FOLDER", help="Records from another machine.")],
    out: Folder = FOLDER,
    replace: Annotated[bool, typer.Option("--replace", help="Replace records that have other numbers.")] = False,
) -> None:
    """Add records from another machine; all are refused if one of them does not fit its study."""
    from . import page, records

    new = records.collect(source, out / page.RECORDS, replace)
    print(f"{len(new)} new records" + "".join(f"\n  {name}" for name in new))


def _heart(processes: int, report: Any, out: Path) -> None:
    """Train the four hospitals and write their page."""
    from . import heart, page

    heart.run(processes, report, out / page.RECORDS / heart.RECORD.name)
    print(heart.write_page(out / page.RECORDS, _heart_page(out)))


def _heart_page(out: Path) -> Path:
    """The page of the four hospitals; it is part of the documentation unless --out is given."""
    from . import heart

    return heart.PAGE if out == FOLDER else out / heart.PAGE.name


def _study_in_file(name: str) -> Study:
    from normec import UsageError
    from normec.system.code_files import object_in_file

    from .studies import Study

    found = object_in_file(name, "study of your own as FILE.py:NAME")
    if not isinstance(found, Study):
        raise UsageError(f"{name} must be a benchmarks.privacy.studies.Study, got {type(found).__name__}")
    return found
