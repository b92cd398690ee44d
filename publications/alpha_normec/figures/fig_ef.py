"""Figure 3: α-NormEC without server normalisation against DP-SGD with smoothed normalisation and no noise, by β."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import versus
from .arms import DPSGD, NORMEC
from .figure import Drawn, Figure
from .protocol import Protocol
from .results import Results

STYLES = {NORMEC.name: "--", DPSGD.name: "-"}  # as in the paper


def cells(protocol: Protocol) -> list[Cell]:
    return versus.cells(protocol, [NORMEC, DPSGD])


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_curves(results, path, [NORMEC, DPSGD], STYLES)


FIGURE = Figure("fig-ef", "α-NormEC without SN against DP-SGD with smoothed normalisation, no noise", cells, draw)
