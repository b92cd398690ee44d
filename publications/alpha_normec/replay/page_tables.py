"""Part 1 on a page: the sixteen accuracies beside the paper's, and when each run passes them."""

from __future__ import annotations

from typing import Any

from normec.experiments.tables import to_markdown

from ..figures import arms
from ..figures.arms import Arm
from ..figures.protocol import extent
from ..figures.published import TABLES
from .facts import NOT_RUN, Facts, passed, rms, text

METHODS = (arms.NORMEC, arms.NORMEC_SN, arms.DPSGD, arms.CLIP21)
Row = dict[str, Any]


def rows(facts: Facts) -> list[Row]:
    """One a method and β: the paper's accuracy, ours over the seeds that ran, and the difference."""
    return [_row(facts, arm, beta) for arm in METHODS for beta in facts.base.betas]


def _row(facts: Facts, arm: Arm, beta: float) -> Row:
    cells, entry = facts.find("tables", arm, beta), TABLES[arm.name][beta]
    final, held_out = facts.average(cells), facts.average(cells, column="held_out")
    best, best_held_out = facts.average(cells, "best"), facts.average(cells, "best", "held_out")
    first = facts.of(cells[0])
    ran = [record for cell in cells if (record := facts.of(cell)) is not None]
    return {
        "method": arm.name,
        "beta": beta,
        "lr": entry.lr,
        "paper": entry.accuracy,
        "final_test": final.value if final else None,
        "final_test_spread": final.spread if final else None,
        "difference": final.value - entry.accuracy if final else None,
        "best_test": best.value if best else None,
        "final_held_out": held_out.value if held_out else None,
        "best_held_out": best_held_out.value if best_held_out else None,
        "seeds": len(ran),
        "seeds_planned": len(cells),
        "diverged": sum(record["status"] == "diverged" for record in ran),
        "passes_paper_at_epoch": passed(first, entry.accuracy) if first is not None else None,
    }


def lines(facts: Facts) -> list[str]:
    found = rows(facts)
    base = facts.base
    shown = [
        [
            row["method"],
            f"{row['beta']:g}",
            f"{row['lr']:g}",
            f"{row['paper']:.2f}",
            _spread(row),
            text(row["difference"], "+.2f") if row["seeds"] else NOT_RUN,
            _number(row, "best_test"),
            _number(row, "final_held_out"),
            _number(row, "best_held_out"),
            f"{row['seeds']} of {row['seeds_planned']}",
        ]
        for row in found
    ]
    header = ("method", "β", "γ", "paper", "ours", "difference", "best", "held out", "held out, best", "seeds")
    known = [row["difference"] for row in found if row["difference"] is not None]
    fit = rms(known)
    summary = "No cell has been run yet."
    if fit is not None:
        above = sum(value > 0 for value in known)
        summary = (
            f"{len(known)} of {len(found)} cells have run: ours is above the paper in {above}, "
            f"the differences have a root mean square of {fit:.2f} points."
        )
    return [
        "# The sixteen accuracies",
        "",
        f"{base.data}, {base.model}, {base.clients} workers, batch {base.batch_size}, {base.rounds} epochs as the "
        f"paper's rounds, α = {base.alpha:g}, the paper's γ. Accuracy in percent on the standard test images at the "
        "end of a run: mean ± standard deviation over seeds. `best` is the highest along the run; `held out` are the "
        "10 % of the training images that no worker has. The paper has one seed.",
        "",
        *to_markdown(header, shown),
        "",
        summary,
        "",
        "## When the paper's number is passed",
        "",
        "The first epoch after which the test accuracy (first seed) is at least the paper's final one; the test set is "
        f"looked at every {(facts.cells[0].config.evaluate_every or 1) // extent(base).steps} epochs.",
        "",
        *to_markdown(("method", *(f"β = {beta:g}" for beta in base.betas)), [_passing(found, arm) for arm in METHODS]),
        "",
        *facts.picture("tables.png", "Curves of the sixteen cells", facts.part("tables")),
        "All numbers: [tables.csv](tables.csv); curves and configurations: `cells/`.",
    ]


def _spread(row: Row) -> str:
    if not row["seeds"]:
        return NOT_RUN
    if row["final_test"] is None:
        return "diverged"
    return f"{row['final_test']:.2f}" + (f" ± {row['final_test_spread']:.2f}" if row["final_test_spread"] else "")


def _number(row: Row, key: str) -> str:
    return NOT_RUN if not row["seeds"] else "–" if row[key] is None else f"{row[key]:.2f}"


def _passing(found: list[Row], arm: Arm) -> list[str]:
    own = [row for row in found if row["method"] == arm.name]
    return [arm.name, *(_epoch(row) for row in own)]


def _epoch(row: Row) -> str:
    if not row["seeds"]:
        return NOT_RUN
    return str(row["passes_paper_at_epoch"]) if row["passes_paper_at_epoch"] is not None else "never"
