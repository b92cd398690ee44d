"""Appendix: minimal training loss, final training loss and final test accuracy of α-NormEC over α and β."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.sweep import Outcome

from . import arms, drawing, fig_params
from .figure import Compared, Drawn, Figure, setting
from .published import TABLES, Said
from .results import Results, Row, point


def draw(results: Results, path: Path) -> Drawn:
    note = setting(results.protocol, arms.NORMEC_SN)
    alphas, betas = results.protocol.alphas, results.protocol.betas
    rows = {place: _row(results, run) for place, run in fig_params.tuned(results).items()}

    def values(key: str) -> list[list[float | None]]:
        return [[rows[alpha, beta][key] for beta in betas] for alpha in alphas]

    tables = [
        drawing.Table("minimal training loss", values("minimal_loss"), "training loss", "loss"),
        drawing.Table("final training loss", values("final_loss"), "training loss", "loss"),
        drawing.Table("final test accuracy", values("final_accuracy"), "test accuracy, %"),
    ]
    drawing.heatmaps(path, tables, drawing.Axes(alphas, betas, "α", "β"), f"NormEC with SN; {note}")
    alpha = results.protocol.alpha
    compared = [
        Compared(
            f"final accuracy, α = {alpha:g}, β = {beta:g}",
            Said.exactly(entry.accuracy),
            rows[alpha, beta]["final_accuracy"],
        )
        for beta, entry in TABLES[arms.NORMEC_SN.name].items()
        if (alpha, beta) in rows
    ]
    return Drawn(note, [{**row, "alpha": a, "beta": b} for (a, b), row in rows.items()], compared)


def _row(results: Results, run: Outcome | None) -> Row:
    losses = [loss for loss in results.curve(run).loss if loss is not None] if run is not None else []
    return {
        **point(run),
        "minimal_loss": min(losses, default=None),
        "final_loss": losses[-1] if losses else None,
        "final_accuracy": results.final(run),
    }


FIGURE = Figure(
    "fig-heatmaps-other", "Minimal loss, final loss and final accuracy of α-NormEC over α and β", fig_params.cells, draw
)
