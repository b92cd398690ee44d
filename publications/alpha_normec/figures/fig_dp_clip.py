"""Figure 5: the highest test accuracy of DP-Clip21 over its threshold (called β, as in the paper) and γ."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import arms, drawing
from .arms import DP_CLIP21
from .fig_dp_heatmaps import grid, highest, rows_of
from .figure import Drawn, Figure, guarantee, setting
from .protocol import Protocol
from .results import Results


def cells(protocol: Protocol) -> list[Cell]:
    return arms.cells(protocol, DP_CLIP21, protocol.private_betas, protocol.lrs)


def draw(results: Results, path: Path) -> Drawn:
    protocol = results.protocol
    values, note = highest(results, DP_CLIP21), setting(protocol, DP_CLIP21)
    drawing.heatmaps(
        path,
        [drawing.Table("DP-Clip21", grid(protocol, values), "highest test accuracy, %")],
        drawing.Axes(protocol.private_betas, protocol.lrs, "β (threshold)", "step size γ"),
        f"{note}; {guarantee(results, results.of(cells(protocol)))}",
    )
    return Drawn(note, rows_of(results, DP_CLIP21, values))


FIGURE = Figure("fig-dp-clip", "Highest test accuracy of DP-Clip21 over β and γ", cells, draw)
