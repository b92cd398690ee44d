"""The page of part 1: the sixteen accuracies next to the paper's, and when each run reaches them."""

from __future__ import annotations

from normec.experiments.export import Row, to_markdown

from ..methods import TABLE_METHODS, PaperMethod
from ..protocol import extent
from ..published import TABLES
from ..results import NOT_RUN, Results, passed, rms, text


def rows(results: Results) -> list[Row]:
    """One row per method and β: the paper's accuracy, ours over the seeds that ran, and the difference."""
    return [_row(results, method, beta) for method in TABLE_METHODS for beta in results.base.betas]


def _row(results: Results, method: PaperMethod, beta: float) -> Row:
    cells, entry = results.find("tables", method, beta), TABLES[method.slug][beta]
    final, held_out = results.average(cells), results.average(cells, column="held_out")
    best, best_held_out = results.average(cells, "best"), results.average(cells, "best", "held_out")
    first = results.of(cells[0])
    ran = [record for cell in cells if (record := results.of(cell)) is not None]
    return {
        "method": method.name,
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


def lines(results: Results) -> list[str]:
    found = rows(results)
    base = results.base
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
            f"{len(known)} of {len(found)} cells have run. Our accuracy is above the paper's in {above} of them; the "
            f"root mean square of the differences is {fit:.2f} points."
        )
    return [
        "# The sixteen accuracies",
        "",
        f"{base.data}, {base.model}, {base.clients} workers, batch size {base.batch_size}, {base.rounds} epochs as the "
        f"paper's rounds, α = {base.alpha:g}, the paper's γ. Accuracies are in percent on the standard test images at "
        "the end of a run, as mean ± standard deviation over seeds. `best` is the highest accuracy along the run; "
        "`held out` is the accuracy on the 10 % of the training images that no worker has. The paper has one seed.",
        "",
        *to_markdown(header, shown),
        "",
        summary,
        "",
        "## When the paper's accuracy is reached",
        "",
        "The first epoch after which the test accuracy (first seed) is at least the paper's final one. The test set is "
        f"evaluated every {(results.cells[0].config.evaluate_every or 1) // extent(base).steps} epochs.",
        "",
        *to_markdown(
            ("method", *(f"β = {beta:g}" for beta in base.betas)), [_passing(found, method) for method in TABLE_METHODS]
        ),
        "",
        *results.picture("tables.png", "Curves of the sixteen cells", results.part("tables")),
        "All numbers: [tables.csv](tables.csv); curves and configurations: [cells](cells).",
    ]


def _spread(row: Row) -> str:
    if not row["seeds"]:
        return NOT_RUN
    if row["final_test"] is None:
        return "diverged"
    return f"{row['final_test']:.2f}" + (f" ± {row['final_test_spread']:.2f}" if row["final_test_spread"] else "")


def _number(row: Row, key: str) -> str:
    return NOT_RUN if not row["seeds"] else "–" if row[key] is None else f"{row[key]:.2f}"


def _passing(found: list[Row], method: PaperMethod) -> list[str]:
    own = [row for row in found if row["method"] == method.name]
    return [method.name, *(_epoch(row) for row in own)]


def _epoch(row: Row) -> str:
    if not row["seeds"]:
        return NOT_RUN
    return str(row["passes_paper_at_epoch"]) if row["passes_paper_at_epoch"] is not None else "never"
