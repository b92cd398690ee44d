"""Figure 1: loss and accuracy of α-NormEC; colours are β, line styles α, each curve with its best step size."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell
from normec.experiments.sweep import Outcome

from . import arms, drawing
from .figure import Drawn, Figure, setting
from .protocol import Protocol
from .results import Results
from .versus import curve_rows

STYLES = ("-", "--", ":", "-.")


def cells(protocol: Protocol) -> list[Cell]:
    return arms.cells(protocol, arms.NORMEC_SN, protocol.betas, protocol.lrs, protocol.alphas)


def tuned(results: Results) -> dict[tuple[float, float], Outcome | None]:
    """The run with the best step size at each (α, β)."""
    protocol = results.protocol
    return {
        (alpha, beta): results.best(arms.NORMEC_SN, beta, protocol.lrs, alpha)
        for alpha in protocol.alphas
        for beta in protocol.betas
    }


def draw(results: Results, path: Path) -> Drawn:
    runs = {place: run for place, run in tuned(results).items() if run is not None}
    names = {alpha: f"α = {alpha:g}" for alpha in results.protocol.alphas}
    lines = [drawing.Line(beta, names[alpha], results.curve(run)) for (alpha, beta), run in runs.items()]
    styles = {name: STYLES[position % len(STYLES)] for position, name in enumerate(names.values())}
    note = setting(results.protocol, arms.NORMEC_SN)
    drawing.curves(path, lines, styles, f"NormEC with SN; {note}")
    return Drawn(note, [row for run in runs.values() for row in curve_rows(results, run)])


FIGURE = Figure("fig-params", "Training loss and test accuracy of α-NormEC over α and β", cells, draw)
