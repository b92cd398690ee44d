"""Part 2 on a page: what the paper leaves open, one reading at a time, and how well each fits its numbers."""

from __future__ import annotations

from typing import Any

from ..tables import to_markdown
from .facts import NOT_RUN, Facts, best_length, passed, rms, text
from .page_tables import METHODS
from .plan import ONCE, ONCE_SAYS, READINGS, Planned, table_cell

Row = dict[str, Any]


def rows(facts: Facts) -> list[Row]:
    """One a cell of a reading: the paper's number, the tables' run of the same cell, and the reading's."""
    found = []
    for cell in facts.part("readings"):
        record, usual = facts.of(cell), _usual(facts, cell)
        ours = record["final"]["test"] if record is not None else None
        before = facts.of(usual)
        found.append(
            {
                "reading": cell.reading,
                "method": cell.arm.name,
                "beta": cell.beta,
                "lr": cell.lr,
                "paper": cell.paper,
                "tables": before["final"]["test"] if before is not None else None,
                "ours": ours,
                "best": facts.highest(cell),
                "difference": ours - cell.paper if ours is not None and cell.paper is not None else None,
                "ran": record is not None,
                "passes_paper_at_epoch": passed(record, cell.paper) if record and cell.paper is not None else None,
                "epsilon": record["privacy"]["epsilon"] if record and record["privacy"] else None,
            }
        )
    return found


def _usual(facts: Facts, cell: Planned) -> Planned | None:
    """The cell of the tables that a reading changes."""
    if cell.arm.private:
        return None
    (own,) = (arm for arm in METHODS if cell.arm.name.startswith(arm.name))
    return table_cell(facts.base, own, cell.beta)


def fits(facts: Facts) -> list[tuple[str, str, float | None, float | None, int]]:
    """Of each reading: its name, what it says, the RMS of the tables' runs and of its own on the same cells, and how
    many of them have run."""
    found = []
    for reading in READINGS:
        own = [row for row in rows(facts) if row["reading"] == reading.name]
        both = [row for row in own if row["ours"] is not None and row["tables"] is not None]
        usual = rms(row["tables"] - row["paper"] for row in both)
        found.append((reading.name, reading.says, usual, rms(row["difference"] for row in both), len(both)))
    return found


def lines(facts: Facts) -> list[str]:
    found = rows(facts)
    return [
        "# Which reading fits",
        "",
        "What the paper does not say, one thing at a time on two or three cells; everything else is as in the tables. "
        "A reading fits better where its runs end nearer to the paper's accuracies than the tables' runs of the same "
        "cells. None was tuned towards them.",
        "",
        *to_markdown(
            ("reading", "what is read otherwise", "RMS as in the tables", "RMS under the reading", "cells run"),
            [
                [f"`{name}`", says, text(usual, ".2f"), text(own, ".2f"), f"{count} of {len(_at(name))}"]
                for name, says, usual, own, count in fits(facts)
            ],
        ),
        "",
        _verdict(facts),
        "",
        "## Cell by cell",
        "",
        *to_markdown(
            ("reading", "method", "β", "γ", "paper", "tables", "this reading", "difference", "passed at epoch"),
            [_line(row) for row in found],
        ),
        "",
        f"`{ONCE}`: {ONCE_SAYS}. The paper prints no accuracy of these cells; its highest private ones are 77.56 "
        "without SN and 72.21 with. Their exact ε is in [readings.csv](readings.csv).",
        "",
        "## Fewer steps a round",
        "",
        *_fewer(facts),
        "",
        "All numbers: [readings.csv](readings.csv).",
    ]


def _at(name: str) -> tuple[Any, ...]:
    (reading,) = (one for one in READINGS if one.name == name)
    return reading.at


def _verdict(facts: Facts) -> str:
    known = [(own - usual, name) for name, _, usual, own, _ in fits(facts) if own is not None and usual is not None]
    if not known:
        return "No reading has been run beside the tables' cells yet."
    change, name = min(known)
    if change >= 0:
        return "None of the readings that have run fits better than the tables' own."
    return (
        f"Of the readings that have run, `{name}` comes nearest: {-change:.2f} points of RMS less than the tables' own."
    )


def _line(row: Row) -> list[str]:
    passes = str(row["passes_paper_at_epoch"]) if row["passes_paper_at_epoch"] is not None else "never"
    return [
        f"`{row['reading']}`",
        row["method"],
        f"{row['beta']:g}",
        f"{row['lr']:g}",
        "–" if row["paper"] is None else f"{row['paper']:.2f}",
        "–" if row["paper"] is None else text(row["tables"], ".2f"),
        "diverged" if row["ran"] and row["ours"] is None else text(row["ours"], ".2f"),
        "–" if row["paper"] is None else text(row["difference"], "+.2f"),
        NOT_RUN if not row["ran"] else passes if row["paper"] is not None else "–",
    ]


def _fewer(facts: Facts) -> list[str]:
    """Read off the curves of the tables: where the runs, cut short, come nearest to the paper."""
    cells = [cell for cell in facts.part("tables") if cell.seed == facts.base.seed]
    pairs = [
        (record, cell.paper) for cell in cells if (record := facts.of(cell)) is not None and cell.paper is not None
    ]
    best = best_length(pairs)
    if best is None:
        return ["Read off the curves of the tables, of which none has been run yet."]
    ends = [record["final"]["test"] - paper for record, paper in pairs if record["final"]["test"] is not None]
    return [
        f"Read off the curves of the {len(pairs)} cells of the tables that have run (first seed): stopped after "
        f"{best[0]} epochs they fit the paper best, with a root mean square of {best[1]:.2f} points; "
        f"at the end it is {text(rms(ends), '.2f')}."
    ]
