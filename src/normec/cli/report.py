"""normec report: an HTML page about a run, a comparison, a sweep, a verification, or several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .output import printable


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, comparisons or sweeps.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the page (default: report.html, in the folder if there is only one).", show_default=False
        ),
    ] = None,
    together: Annotated[bool, typer.Option(help="One page for several runs, or one page in each folder.")] = True,
    as_json: o.Json = False,
) -> int:
    """Write an HTML page about runs. It is one file, with results, curves, privacy, ledger, clients and timing."""
    from ..errors import UsageError
    from ..report import page

    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a folder; name a file, such as {out / page.NAME}")
    if len(folders) == 1:
        written = [page.write(folders[0], out)]
    elif together:
        written = [page.write_many(folders, out or Path(page.NAME))]
    elif out is not None:
        raise UsageError("--out is the name of one page; leave it out with --no-together")
    else:
        written = [page.write(folder) for folder in folders]
    if as_json:
        print(json.dumps([str(path) for path in written]))
    else:
        for path in written:
            print(f"page: {printable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
