"""The page of part 2: details that the paper leaves open, and how well each reading fits its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normec.experiments.export import Row, to_markdown

from ..methods import TABLE_METHODS
from ..plan import ONCE, ONCE_SAYS, READINGS, Cell, Reading, table_cell
from ..published import PEAK, PEAK_SN
from ..records import Record
from ..results import NOT_RUN, Results, at_epoch, best_length, passed, rms, text

FAR = 20.0  # RMS in points above which the page gives a reason


def rows(results: Results) -> list[Row]:
    """One row per cell of a reading: the paper's number, the run of the tables, and the run of the reading."""
    found = []
    for cell in results.part("readings"):
        record, usual = results.of(cell), _usual(results, cell)
        ours = record["final"]["test"] if record is not None else None
        before = results.of(usual)
        found.append(
            {
                "reading": cell.reading,
                "method": cell.method.name,
                "beta": cell.beta,
                "lr": cell.lr,
                "paper": cell.paper,
                "tables": before["final"]["test"] if before is not None else None,
                "ours": ours,
                "best": results.highest(cell),
                "difference": ours - cell.paper if ours is not None and cell.paper is not None else None,
                "ran": record is not None,
                "loss": record["final"]["loss"] if record is not None else None,
                "passes_paper_at_epoch": passed(record, cell.paper) if record and cell.paper is not None else None,
                "epsilon": record["privacy"]["epsilon"] if record and record["privacy"] else None,
            }
        )
    return found


def _usual(results: Results, cell: Cell) -> Cell | None:
    """The cell of the tables that a reading changes."""
    if cell.method.private:
        return None
    (own,) = (method for method in TABLE_METHODS if method.slug == cell.method.slug)
    return table_cell(results.base, own, cell.beta)


@dataclass(frozen=True)
class Fit:
    """The distance of a reading's runs from the paper, as root mean squares in points over `cells` cells.

    `usual` is the distance of the tables' runs of the same cells, and `stopped` that of these runs at the epoch that
    fits all sixteen cells best.
    """

    reading: Reading
    usual: float | None
    stopped: float | None
    own: float | None
    cells: int


def fits(results: Results) -> list[Fit]:
    best = best_length(_sixteen(results))
    return [_fit(results, reading, best[0] if best is not None else None) for reading in READINGS]


def _fit(results: Results, reading: Reading, epoch: int | None) -> Fit:
    """The fit over the cells for which both the run of the reading and that of the tables finished."""
    usual, stopped, own = [], [], []
    for cell in results.part("readings"):
        record, before = results.of(cell), results.of(_usual(results, cell))
        if cell.reading != reading.name or record is None or before is None or cell.paper is None:
            continue
        if record["final"]["test"] is None or before["final"]["test"] is None:
            continue
        usual.append(before["final"]["test"] - cell.paper)
        own.append(record["final"]["test"] - cell.paper)
        early = at_epoch(before, epoch) if epoch is not None else None
        stopped += [early - cell.paper] if early is not None else []
    return Fit(reading, rms(usual), rms(stopped), rms(own), len(own))


def _sixteen(results: Results) -> list[tuple[Record, float]]:
    """The runs of the tables with the first seed, and the paper's accuracies."""
    cells = [cell for cell in results.part("tables") if cell.seed == results.base.seed]
    return [
        (record, cell.paper) for cell in cells if (record := results.of(cell)) is not None and cell.paper is not None
    ]


def lines(results: Results) -> list[str]:
    found, judged = rows(results), fits(results)
    return [
        "# Which reading fits",
        "",
        "A reading is an interpretation of one detail that the paper does not state. Each is run on up to three cells "
        "of the tables, with everything else unchanged. A reading fits better if its runs end closer to the paper's "
        "accuracies than the tables' runs of the same cells. No reading was tuned towards them.",
        "",
        *to_markdown(
            ("reading", "what differs", *_rms_columns(results), "cells run"),
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
        *_precision(results),
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
                "reached at epoch",
            ),
            [_line(row) for row in found],
        ),
        "",
        f"`{ONCE}`: {ONCE_SAYS}. The paper prints no accuracy of these cells; its highest private accuracies are "
        f"{PEAK.text} without SN and {PEAK_SN.text} with SN. Their exact ε is in [readings.csv](readings.csv).",
        "",
        "## Fewer steps per round",
        "",
        *_fewer(results),
        "",
        "All numbers: [readings.csv](readings.csv).",
    ]


def _rms_columns(results: Results) -> tuple[str, str, str]:
    best = best_length(_sixteen(results))
    stopped = "RMS of the tables, stopped early" if best is None else f"RMS of the tables after {best[0]} epochs"
    return "RMS of the tables", stopped, "RMS of the reading"


def _verdict(judged: Sequence[Fit]) -> str:
    known = [(fit.own, fit.usual, fit) for fit in judged if fit.own is not None and fit.usual is not None]
    if not known:
        return "No reading has been run together with the cells of the tables."
    better = [(own, usual, fit) for own, usual, fit in known if own < usual]
    if not better:
        return "No reading fits better than the tables."
    named = [
        f"`{fit.reading.name}` (on {fit.cells} cells, {own:.2f} instead of {usual:.2f})" for own, usual, fit in better
    ]
    found = f"Closer to the paper than the tables: {', '.join(named)}."
    if all(fit.stopped is not None and fit.stopped <= own for own, _, fit in better):
        found += " No reading is closer than the runs of the tables if these are stopped early."
    return found


def _reasons(judged: Sequence[Fit]) -> list[str]:
    """The reasons of the readings that end far from the paper."""
    far = [fit.reading for fit in judged if fit.own is not None and fit.own > FAR and fit.reading.because]
    if not far:
        return []
    return [
        "Readings that end far from the paper, and why:",
        "",
        *(f"- `{one.name}`: {one.because}" for one in far),
        "",
    ]


def _precision(results: Results) -> list[str]:
    """The effect of the precision: a run in TF32 next to the runs of the same cell in bf16."""
    found = []
    for cell in (one for one in results.part("readings") if one.reading == "tf32"):
        tables = [one for one in results.part("tables") if (one.method, one.beta) == (cell.method, cell.beta)]
        own, usual = _ends(results, [cell]), _ends(results, tables)
        if own and usual:
            seeds = f"in bf16 it ended at {', '.join(usual)} (one seed each)"
            found += [f"In TF32 {cell.method.name} at β = {cell.beta:g} ends at {own[0]}; {seeds}.", ""]
    return found


def _ends(results: Results, cells: Sequence[Cell]) -> list[str]:
    records = [record for cell in cells if (record := results.of(cell)) is not None]
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


def _fewer(results: Results) -> list[str]:
    """The length at which the runs of the tables are closest to the paper."""
    pairs = _sixteen(results)
    best = best_length(pairs)
    if best is None:
        return ["This is read off the curves of the tables, of which none has been run yet."]
    ends = [record["final"]["test"] - paper for record, paper in pairs if record["final"]["test"] is not None]
    return [
        f"The curves of the {len(pairs)} cells of the tables that have run (first seed) fit the paper best after "
        f"{best[0]} epochs, with a root mean square of {best[1]:.2f} points; at the end it is {text(rms(ends), '.2f')}."
    ]
