"""Appendix: Clip21 against α-NormEC without server normalisation; loss and accuracy by β."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import versus
from .arms import CLIP21, NORMEC
from .figure import Drawn, Figure
from .protocol import Protocol
from .results import Results

STYLES = {CLIP21.name: "-", NORMEC.name: "--"}  # as in the paper


def cells(protocol: Protocol) -> list[Cell]:
    return versus.cells(protocol, [CLIP21, NORMEC])


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_curves(results, path, [CLIP21, NORMEC], STYLES)


FIGURE = Figure("fig-clip", "Clip21 against α-NormEC without SN, no noise", cells, draw)
