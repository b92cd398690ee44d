"""α-NormEC over α and β, each point with its best step size: fig-params, fig-heatmap, fig-heatmaps-other."""

from __future__ import annotations

import statistics
from pathlib import Path

from normec.experiments.export import Row

from .. import drawing, published
from ..methods import NORMEC_SN
from ..plan import Cell, cell_at, step_sizes
from ..protocol import Protocol
from ..published import PaperNumber, printed
from ..results import Results
from .figure import Comparison, Drawn, Figure, point, setting
from .method_pairs import curve_rows

STYLES = ("-", "--", ":", "-.")


def candidates(protocol: Protocol, alpha: float, beta: float) -> list[Cell]:
    """The cells at a point, one per step size to choose from."""
    return [cell_at(protocol, NORMEC_SN, beta, lr, alpha) for lr in step_sizes(protocol, NORMEC_SN, beta)]


def cells(protocol: Protocol) -> list[Cell]:
    return [one for alpha in protocol.alphas for beta in protocol.betas for one in candidates(protocol, alpha, beta)]


def tuned(results: Results) -> dict[tuple[float, float], Cell | None]:
    """The cell with the best step size at each (α, β)."""
    base = results.base
    return {(a, b): results.best(candidates(base, a, b)) for a in base.alphas for b in base.betas}


def draw_curves(results: Results, path: Path) -> Drawn:
    """Figure 1: loss and accuracy; colours show β and line styles show α."""
    runs = {pair: run for pair, run in tuned(results).items() if run is not None}
    names = {alpha: f"α = {alpha:g}" for alpha in results.base.alphas}
    lines = [drawing.Line(beta, names[alpha], results.curve(run)) for (alpha, beta), run in runs.items()]
    styles = {name: STYLES[position % len(STYLES)] for position, name in enumerate(names.values())}
    note = setting(results.base, NORMEC_SN)
    drawing.curves(path, lines, styles, f"NormEC with SN; {note}")
    return Drawn(note, [row for run in runs.values() for row in curve_rows(results, run)])


def draw_heatmap(results: Results, path: Path) -> Drawn:
    """Figure 2: the highest test accuracy."""
    alphas, betas, column = results.base.alphas, results.base.betas, results.base.column
    note, runs = setting(results.base, NORMEC_SN), tuned(results)
    highest = {pair: results.highest(run, column) for pair, run in runs.items()}
    values = [[highest[alpha, beta] for beta in betas] for alpha in alphas]
    drawing.heatmaps(
        path,
        [drawing.Table("NormEC with SN", values, "highest test accuracy, %")],
        drawing.Axes(alphas, betas, "α", "β"),
        note,
    )
    rows = [
        {**point(results, run), "alpha": alpha, "beta": beta, "highest_accuracy": highest[alpha, beta]}
        for (alpha, beta), run in runs.items()
    ]
    return Drawn(note, rows, compare_heatmap(highest))


def compare_heatmap(highest: dict[tuple[float, float], float | None]) -> list[Comparison]:
    """The best cell, the cell that is best in the paper, and the means over α for the β that the text mentions."""
    known = {pair: value for pair, value in highest.items() if value is not None}
    found = [Comparison("best of all", published.BEST, max(known.values(), default=None))]
    if published.BEST_AT in highest:
        found.append(Comparison("at α = 0.1, β = 0.1", published.BEST, highest[published.BEST_AT]))
    for beta, said in published.BY_BETA.items():
        column = [value for (_, b), value in known.items() if b == beta]
        if column:
            found.append(Comparison(f"β = {beta:g}, mean over α", said, statistics.fmean(column)))
    return found


def draw_other_heatmaps(results: Results, path: Path) -> Drawn:
    """Appendix: minimal training loss, final training loss and final test accuracy."""
    base, note = results.base, setting(results.base, NORMEC_SN)
    rows = {pair: _row(results, run) for pair, run in tuned(results).items()}

    def values(key: str) -> list[list[float | None]]:
        return [[rows[alpha, beta][key] for beta in base.betas] for alpha in base.alphas]

    tables = [
        drawing.Table("minimal training loss", values("minimal_loss"), "training loss", "loss"),
        drawing.Table("final training loss", values("final_loss"), "training loss", "loss"),
        drawing.Table("final test accuracy", values("final_accuracy"), "test accuracy, %"),
    ]
    drawing.heatmaps(path, tables, drawing.Axes(base.alphas, base.betas, "α", "β"), f"NormEC with SN; {note}")
    compared = [
        Comparison(
            f"final accuracy, α = {base.alpha:g}, β = {beta:g}",
            PaperNumber.exactly(entry.accuracy),
            rows[base.alpha, beta]["final_accuracy"],
        )
        for beta in base.betas
        if (entry := printed(NORMEC_SN, beta)) is not None and (base.alpha, beta) in rows
    ]
    return Drawn(note, [{**row, "alpha": a, "beta": b} for (a, b), row in rows.items()], compared)


def _row(results: Results, run: Cell | None) -> Row:
    losses = [loss for loss in results.curve(run).loss if loss is not None] if run is not None else []
    return {
        **point(results, run),
        "minimal_loss": min(losses, default=None),
        "final_loss": losses[-1] if losses else None,
        "final_accuracy": results.final(run, results.base.column),
    }


PARAMS = Figure("fig-params", "Training loss and test accuracy of α-NormEC over α and β", cells, draw_curves)
HEATMAP = Figure("fig-heatmap", "Highest test accuracy of α-NormEC over α and β", cells, draw_heatmap)
OTHER_HEATMAPS = Figure(
    "fig-heatmaps-other",
    "Minimal loss, final loss and final accuracy of α-NormEC over α and β",
    cells,
    draw_other_heatmaps,
)
