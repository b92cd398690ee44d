"""The commands: check, page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from normec.errors import one_of

FOLDER = Path(__file__).parent
RECORDS = FOLDER / "records.jsonl"
PAGE = FOLDER.parents[1] / "docs" / "results" / "suggested-settings.md"
app = typer.Typer(
    name="python -m benchmarks.suggest",
    help="Compare suggested settings with tuned ones and with the usual ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Records = Annotated[Path, typer.Option("--records", help="File of the records.")]


@app.command("check")
def check(
    only: Annotated[list[str] | None, typer.Option(help="A condition, as CONDITION/METHOD (default: all).")] = None,
    records: Records = RECORDS,
    again: Annotated[
        bool, typer.Option("--suggested-only", help="Keep tuned and usual settings that have been measured.")
    ] = False,
) -> None:
    """Measure conditions; LIBSVM files are read from the folder in NORMEC_DATA."""
    from . import check as checks
    from .conditions import CONDITIONS

    for key in only or ():
        one_of(CONDITIONS, only=key)
    checks.run(only or list(CONDITIONS), records, lambda line: print(line, file=sys.stderr, flush=True), again)


@app.command("page")
def page(records: Records = RECORDS, out: Annotated[Path, typer.Option(help="The page.")] = PAGE) -> None:
    """Write the page of the results."""
    from . import page as pages
    from .check import read

    out.write_text(pages.page(read(records)), encoding="utf-8")
    print(out)
