"""Write all pages: README.md, and a page, a CSV file and pictures per part in records/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from normec import UsageError
from normec.experiments.export import Row, to_csv, to_markdown
from normec.system.files import write_atomic

from .. import records
from ..figures.catalogue import FIGURES
from ..plan import PARTS, plan
from ..protocol import Protocol
from ..published import TABLES
from ..results import Results
from . import alpha_beta, claims, private, readings, tables

PAGES = {"tables": tables, "readings": readings, "private": private, "alpha": alpha_beta}
SHOWS = {
    "tables": "The sixteen accuracies of the paper's three tables",
    "readings": "Details that the paper leaves open, one reading at a time",
    "private": "The private figures, with their exact ε",
    "alpha": "The heat map over α × β",
}
COMMAND = "python -m publications.alpha_normec"


def write(base: Protocol, folder: Path, pictures: bool = True) -> list[Path]:
    """Write the pages of the records in `folder`/records/cells.

    Args:
        base: The protocol.
        folder: The folder of README.md and records/.
        pictures: Draw the pictures as well.

    Returns:
        The files that were written.

    Raises:
        UsageError: The protocol has a β that the paper's tables do not have, or a record does not fit the plan.
    """
    unknown = set(base.betas) - {beta for entries in TABLES.values() for beta in entries}
    if unknown:
        raise UsageError(f"the paper's tables have no beta = {min(unknown):g}; leave betas as they are")
    results = Results(base, records.read(folder, plan(base)))
    inner = folder / records.FOLDER.parent
    inner.mkdir(parents=True, exist_ok=True)
    made = []
    for part, page in PAGES.items():
        made += [inner / f"{part}.md", inner / f"{part}.csv"]
        _text(made[-2], page.lines(results))
        write_atomic(made[-1], to_csv([_rounded(row) for row in page.rows(results)]))
    made += [inner / claims.FILE, folder / "README.md"]
    _text(made[-2], claims.lines(results))
    _text(made[-1], readme(results))
    if pictures:
        from . import pictures as drawn

        made += drawn.draw(results, inner)
    return made


def readme(results: Results) -> list[str]:
    """README.md: the results, the commands, and the modules."""
    inner = records.FOLDER.parent.as_posix()
    return [
        "# Smoothed Normalization for Efficient Distributed Private Optimization",
        "",
        "A reproduction of the experiments of Shulgin, Khirirat and Richtárik. Every run is a cell of one plan with a "
        "stable name; a finished cell leaves a record, and all figures, tables and pages are made from the records. "
        "[docs/results/reproduce.md](../../docs/results/reproduce.md) explains the protocol, the scales and the noise.",
        "",
        "## Results",
        "",
        *to_markdown(("part", "page", "cells run"), [_progress(results, part) for part in PARTS]),
        f"| claims | [The paper's claims, one by one]({inner}/{claims.FILE}) | – |",
        "",
        *claims.summary(results, f"{inner}/{claims.FILE}"),
        "",
        'A cell that was not run is marked "not run", and a claim with missing cells is waiting. Which method is '
        "best at a true ε is another question, which [benchmarks/privacy](../../benchmarks/privacy/README.md) answers.",
        "",
        "## Commands",
        "",
        "Run them in the root of the repository; `make reproduce` draws all figures at smoke scale.",
        "",
        f"    {COMMAND} list                            # every cell, the paper's accuracy, and its state",
        f"    {COMMAND} run tables --together 4         # run the cells of a part that have no record",
        f"    {COMMAND} run --limit-seconds 3000        # run pending cells until the time limit",
        f"    {COMMAND} collect FILE.tgz                # add records from another machine",
        f"    {COMMAND} figures all --scale smoke       # the paper's figures and tables, on digits",
        f"    {COMMAND} figures tab-ef --scale paper    # drawn from the records, or run on a GPU",
        f"    {COMMAND} pages                           # this page, and those in {inner}/",
        "",
        "Interrupted commands continue when they are started again.",
        "",
        "## Figures",
        "",
        *to_markdown(("name", "content"), [[f"`{one.name}`", one.shows] for one in FIGURES]),
        "",
        "## Modules",
        "",
        *to_markdown(("module", "content"), MODULES),
        "",
        *_machines(results),
    ]


MODULES = [
    ["[protocol.py](protocol.py)", "every setting of the experiments: stated by the paper, or left open"],
    ["[methods.py](methods.py)", "the methods under their names in the paper, and the configuration of a run"],
    ["[published.py](published.py)", "the numbers that the paper prints"],
    ["[plan.py](plan.py)", "the cells"],
    ["[runner.py](runner.py)", "runs cells that have no record"],
    [
        "[records.py](records.py)",
        "one JSON file per finished cell: accuracies, curve, configuration, command, versions",
    ],
    ["[results.py](results.py)", "what figures and pages read off the records"],
    ["[drawing.py](drawing.py)", "curves, heat maps and tables as pictures"],
    ["[figures](figures)", "the paper's figures and tables: the cells they need, and how they are drawn"],
    ["[pages](pages)", "the pages in Markdown, and the claims"],
]


def _progress(results: Results, part: str) -> list[str]:
    cells = results.part(part)
    done = sum(cell.name in results.records for cell in cells)
    return [f"`{part}`", f"[{SHOWS[part]}]({records.FOLDER.parent.as_posix()}/{part}.md)", f"{done} of {len(cells)}"]


def _machines(results: Results) -> list[str]:
    """The devices of the records, and their computing time."""
    if not results.records:
        return ["No cell has been run yet."]
    kinds = Counter((record["device"], record["config"]["precision"]) for record in results.records.values())
    # Runs that take turns on a device share its time.
    seconds = sum((record["seconds"] or 0.0) / record["together"] for record in results.records.values())
    most = max(record["together"] for record in results.records.values())
    turns = f", at most {most} at a time" if most > 1 else ""
    where = ", ".join(f"{count} on {device} ({precision})" for (device, precision), count in kinds.most_common())
    return [f"{len(results.records)} cells have run: {where}; {seconds / 60:.0f} minutes of device time{turns}."]


def _text(path: Path, lines: Sequence[str]) -> None:
    write_atomic(path, "\n".join(lines).rstrip() + "\n")


def _rounded(row: Row) -> Row:
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
