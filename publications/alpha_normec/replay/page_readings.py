"""Part 2 on a page: what the paper leaves open, one reading at a time, and how well each fits its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normec.experiments.tables import to_markdown

from .facts import NOT_RUN, Facts, at_epoch, best_length, passed, rms, text
from .page_tables import METHODS
from .plan import ONCE, ONCE_SAYS, READINGS, Planned, Reading, table_cell
from .records import Record

Row = dict[str, Any]
FAR = 20.0  # points of RMS that ask for a reason


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
                "loss": record["final"]["loss"] if record is not None else None,
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


@dataclass(frozen=True)
class Fit:
    """How far a reading's runs end from the paper, and on the same cells the tables' runs: in full, and stopped at the
    epoch that suits all sixteen best. Root mean squares, in points; `cells` have run."""

    reading: Reading
    usual: float | None
    stopped: float | None
    own: float | None
    cells: int


def fits(facts: Facts) -> list[Fit]:
    best = best_length(_sixteen(facts))
    return [_fit(facts, reading, best[0] if best is not None else None) for reading in READINGS]


def _fit(facts: Facts, reading: Reading, epoch: int | None) -> Fit:
    """Over the cells on which the reading's run and the tables' came to their ends."""
    usual, stopped, own = [], [], []
    for cell in facts.part("readings"):
        record, before = facts.of(cell), facts.of(_usual(facts, cell))
        if cell.reading != reading.name or record is None or before is None or cell.paper is None:
            continue
        if record["final"]["test"] is None or before["final"]["test"] is None:
            continue
        usual.append(before["final"]["test"] - cell.paper)
        own.append(record["final"]["test"] - cell.paper)
        early = at_epoch(before, epoch) if epoch is not None else None
        stopped += [early - cell.paper] if early is not None else []
    return Fit(reading, rms(usual), rms(stopped), rms(own), len(own))


def _sixteen(facts: Facts) -> list[tuple[Record, float]]:
    """The tables' runs, first seed, beside the paper's accuracies."""
    cells = [cell for cell in facts.part("tables") if cell.seed == facts.base.seed]
    return [(record, cell.paper) for cell in cells if (record := facts.of(cell)) is not None and cell.paper is not None]


def lines(facts: Facts) -> list[str]:
    found, judged = rows(facts), fits(facts)
    return [
        "# Which reading fits",
        "",
        "What the paper does not say, one thing at a time on two or three cells; everything else is as in the tables. "
        "A reading fits better where its runs end nearer to the paper's accuracies than the tables' runs of the same "
        "cells. None was tuned towards them.",
        "",
        *to_markdown(
            ("reading", "what is read otherwise", *_rms_columns(facts), "cells run"),
            [
                [
                    f"`{fit.reading.name}`",
                    fit.reading.says,
                    *(text(value, ".2f") for value in (fit.usual, fit.stopped, fit.own)),
                    f"{fit.cells} of {len(fit.reading.at)}",
                ]
                for fit in judged
            ],
        ),
        "",
        _verdict(judged),
        "",
        *_reasons(judged),
        *_precision(facts),
        "## Cell by cell",
        "",
        *to_markdown(
            (
                "reading",
                "method",
                "β",
                "γ",
                "paper",
                "tables",
                "this reading",
                "difference",
                "training loss",
                "passed at epoch",
            ),
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


def _rms_columns(facts: Facts) -> tuple[str, str, str]:
    best = best_length(_sixteen(facts))
    stopped = "RMS as in the tables, stopped early" if best is None else f"RMS of those after {best[0]} epochs"
    return "RMS as in the tables", stopped, "RMS under the reading"


def _verdict(judged: Sequence[Fit]) -> str:
    known = [(fit.own, fit.usual, fit) for fit in judged if fit.own is not None and fit.usual is not None]
    if not known:
        return "No reading has been run beside the tables' cells yet."
    better = [(own, usual, fit) for own, usual, fit in known if own < usual]
    if not better:
        return "None that has run fits better than the tables' own."
    named = [f"`{fit.reading.name}` (on {fit.cells} cells {usual:.2f} became {own:.2f})" for own, usual, fit in better]
    found = f"Nearer to the paper than the tables' own: {', '.join(named)}."
    if all(fit.stopped is not None and fit.stopped <= own for own, _, fit in better):
        found += " None comes nearer than the tables' own runs do when they stop early."
    return found


def _reasons(judged: Sequence[Fit]) -> list[str]:
    """Why a reading ends far from the paper, of those that do."""
    far = [fit.reading for fit in judged if fit.own is not None and fit.own > FAR and fit.reading.because]
    if not far:
        return []
    return ["Far from the paper, and why:", "", *(f"- `{one.name}`: {one.because}" for one in far), ""]


def _precision(facts: Facts) -> list[str]:
    """Whether bf16 matters: what a run in TF32 ends at, beside the tables' of the same cell with all their seeds."""
    found = []
    for cell in (one for one in facts.part("readings") if one.reading == "tf32"):
        tables = [one for one in facts.part("tables") if (one.arm, one.beta) == (cell.arm, cell.beta)]
        own, usual = _ends(facts, [cell]), _ends(facts, tables)
        if own and usual:
            seeds = f"in bf16 it ended at {', '.join(usual)} (a seed each)"
            found += [f"In TF32 {cell.arm.name} at β = {cell.beta:g} ends at {own[0]}; {seeds}.", ""]
    return found


def _ends(facts: Facts, cells: Sequence[Planned]) -> list[str]:
    records = [record for cell in cells if (record := facts.of(cell)) is not None]
    return [f"{record['final']['test']:.2f}" for record in records if record["final"]["test"] is not None]


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
        "–" if row["ran"] and row["loss"] is None else text(row["loss"], ".3g"),
        NOT_RUN if not row["ran"] else passes if row["paper"] is not None else "–",
    ]


def _fewer(facts: Facts) -> list[str]:
    """Read off the curves of the tables: where the runs, cut short, come nearest to the paper."""
    pairs = _sixteen(facts)
    best = best_length(pairs)
    if best is None:
        return ["Read off the curves of the tables, of which none has been run yet."]
    ends = [record["final"]["test"] - paper for record, paper in pairs if record["final"]["test"] is not None]
    return [
        f"Read off the curves of the {len(pairs)} cells of the tables that have run (first seed): stopped after "
        f"{best[0]} epochs they fit the paper best, with a root mean square of {best[1]:.2f} points; "
        f"at the end it is {text(rms(ends), '.2f')}."
    ]
