"""All pages of the replay, made from its records: Markdown, CSV, pictures, and the results in the project's README."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.privacy import page as honest
from normec.errors import UsageError
from normec.experiments.tables import Row, to_csv, to_markdown
from normec.system.files import write_atomic

from ..figures.protocol import Protocol
from . import claims, page_alpha, page_claims, page_private, page_readings, page_tables, records
from .collect import HONEST
from .facts import Facts
from .plan import PARTS, plan

PAGES = {"tables": page_tables, "readings": page_readings, "private": page_private, "alpha": page_alpha}
SHOWS = {
    "tables": "the sixteen accuracies of the paper's three tables",
    "readings": "what the paper leaves open, one reading at a time",
    "private": "the private figures, with the ε that they have",
    "alpha": "the heat map over α × β",
}
BEGIN, END = "<!-- replay: made by `normec replay pages` -->", "<!-- end of replay -->"


def write(base: Protocol, folder: Path, readme: Path | None = None, pictures: bool = True) -> list[Path]:
    """Everything that the records in `folder` allow; returns what was written."""
    facts = Facts(base, records.read(folder / records.FOLDER, plan(base)))
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for part, page in PAGES.items():
        made += [folder / f"{part}.md", folder / f"{part}.csv"]
        _text(made[-2], page.lines(facts))
        write_atomic(made[-1], to_csv([_rounded(row) for row in page.rows(facts)]))
    made += [folder / page_claims.FILE, folder / "README.md"]
    _text(made[-2], page_claims.lines(facts))
    _text(made[-1], index(facts, folder))
    made += honest.write(folder / HONEST, pictures)
    if pictures:
        from . import pictures as drawn

        made += drawn.draw(facts, folder)
    if readme is not None:
        section(readme, results(facts, folder, Path(os.path.relpath(folder, readme.parent))))
        made.append(readme)
    return made


def index(facts: Facts, folder: Path) -> list[str]:
    """The first page: what there is, how to make it again, and the claims."""
    base = facts.base
    return [
        "# The replay",
        "",
        f"The paper's experiments again on {base.data}, beside its numbers. A result is what was run: a cell that was "
        'not run says "not run". Every page, table and picture here is made from the records by `normec replay pages`.',
        "",
        *to_markdown(("part", "what", "cells run"), [_standing(facts, part) for part in PARTS]),
        f"| 5 | [the paper's claims, one by one]({page_claims.FILE}) | – |",
        f"| 6 | [what honest privacy gives]({HONEST}/README.md) | {honest.standing(folder / HONEST)} |",
        "",
        "## The claims",
        "",
        *page_claims.summary(facts),
        "",
        "## Make it again",
        "",
        "    normec replay list                       # every cell by name, and where it stands",
        "    normec replay run tables-normec-beta-0.1-seed-42",
        "    normec replay run --together 4 --limit-seconds 3000",
        "    normec replay collect FILE.tgz           # records from another machine",
        "    normec replay pages --readme README.md",
        "",
        "`cells/` has one file a cell: accuracies, curve, configuration, command, versions, device, seed and seconds.",
        "",
        *_machines(facts),
    ]


def _standing(facts: Facts, part: str) -> list[str]:
    cells = facts.part(part)
    done = sum(cell.name in facts.records for cell in cells)
    return [str(PARTS.index(part) + 1), f"[{SHOWS[part]}]({part}.md)", f"{done} of {len(cells)}"]


def _machines(facts: Facts) -> list[str]:
    """Where the records were made, and what they cost."""
    if not facts.records:
        return ["No cell has been run yet."]
    kinds = Counter((record["device"], record["config"]["precision"]) for record in facts.records.values())
    # Runs in turns on one device take its time together.
    seconds = sum((record["seconds"] or 0.0) / record["together"] for record in facts.records.values())
    most = max(record["together"] for record in facts.records.values())
    turns = f", at most {most} at a time" if most > 1 else ""
    where = ", ".join(f"{count} on {device} ({precision})" for (device, precision), count in kinds.most_common())
    return [f"{len(facts.records)} cells have run: {where}; {seconds / 60:.0f} minutes of the devices' time{turns}."]


def results(facts: Facts, folder: Path, link: Path) -> list[str]:
    """The project README's results: the sixteen accuracies, the claims in a line each, honest privacy.

    `link` is the folder as it is reached from there.
    """
    cells = facts.part("tables")
    done = sum(cell.name in facts.records for cell in cells)
    lines = [f"**The paper's sixteen accuracies** ([replay]({link.as_posix()}/README.md)): "]
    if done:
        found = page_tables.rows(facts)
        lines[0] += f"paper / ours on the standard test images, {done} of {len(cells)} runs made."
        header = ("", *(f"β = {beta:g}" for beta in facts.base.betas))
        shown = [[arm.name, *(_pair(row) for row in found if row["method"] == arm.name)] for arm in page_tables.METHODS]
        lines += ["", *to_markdown(header, shown), ""]
        lines += [f"- {claim.says} **{claim.verdict(facts)}**" for claim in claims.CLAIMS]
    else:
        lines[0] += "not run yet; `normec replay run tables` runs them on a GPU."
    return [*lines, "", *honest.summary(folder / HONEST, link / HONEST)]


def _pair(row: Row) -> str:
    ours = "not run" if not row["seeds"] else "diverged" if row["final_test"] is None else f"{row['final_test']:.1f}"
    return f"{row['paper']:.1f} / {ours}"


def section(path: Path, lines: Sequence[str]) -> None:
    """Put lines between the markers of a file; everything else of it stays."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"{path} must have the lines {BEGIN!r} and {END!r}, once each, in this order")
    before, _, rest = text.partition(BEGIN)
    write_atomic(path, "\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


def _text(path: Path, lines: Sequence[str]) -> None:
    write_atomic(path, "\n".join(lines).rstrip() + "\n")


def _rounded(row: Row) -> Row:
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
