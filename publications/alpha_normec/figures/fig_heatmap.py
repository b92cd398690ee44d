"""Figure 2: the highest test accuracy of α-NormEC over α and β, each with its best step size."""

from __future__ import annotations

import statistics
from pathlib import Path

from . import arms, drawing, fig_params, published
from .figure import Compared, Drawn, Figure, setting
from .results import Results, point


def draw(results: Results, path: Path) -> Drawn:
    alphas, betas = results.protocol.alphas, results.protocol.betas
    note, runs = setting(results.protocol, arms.NORMEC_SN), fig_params.tuned(results)
    highest = {place: results.highest(run) for place, run in runs.items()}
    values = [[highest[alpha, beta] for beta in betas] for alpha in alphas]
    drawing.heatmaps(
        path,
        [drawing.Table("NormEC with SN", values, "highest test accuracy, %")],
        drawing.Axes(alphas, betas, "α", "β"),
        note,
    )
    rows = [
        {**point(run), "alpha": alpha, "beta": beta, "highest_accuracy": highest[alpha, beta]}
        for (alpha, beta), run in runs.items()
    ]
    return Drawn(note, rows, compare(highest))


def compare(highest: dict[tuple[float, float], float | None]) -> list[Compared]:
    """The best cell, the paper's best cell, and the means over α of the columns that the text speaks of."""
    known = {place: value for place, value in highest.items() if value is not None}
    found = [Compared("best of all", published.BEST, max(known.values(), default=None))]
    if published.BEST_AT in highest:
        found.append(Compared("at α = 0.1, β = 0.1", published.BEST, highest[published.BEST_AT]))
    for beta, said in published.BY_BETA.items():
        column = [value for (_, b), value in known.items() if b == beta]
        if column:
            found.append(Compared(f"β = {beta:g}, mean over α", said, statistics.fmean(column)))
    return found


FIGURE = Figure("fig-heatmap", "Highest test accuracy of α-NormEC over α and β", fig_params.cells, draw)
