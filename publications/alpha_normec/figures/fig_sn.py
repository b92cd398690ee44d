"""Appendix: α-NormEC with and without server normalisation; loss and accuracy by β."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import versus
from .arms import NORMEC, NORMEC_SN
from .figure import Drawn, Figure
from .protocol import Protocol
from .results import Results

STYLES = {NORMEC_SN.name: "-", NORMEC.name: "--"}  # as in the paper


def cells(protocol: Protocol) -> list[Cell]:
    return versus.cells(protocol, [NORMEC_SN, NORMEC])


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_curves(results, path, [NORMEC_SN, NORMEC], STYLES)


FIGURE = Figure("fig-sn", "α-NormEC with and without SN, no noise", cells, draw)
