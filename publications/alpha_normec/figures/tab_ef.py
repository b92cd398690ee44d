"""Appendix: best step sizes and final accuracies of α-NormEC without server normalisation and of DP-SGD."""

from __future__ import annotations

from pathlib import Path

from . import fig_ef, versus
from .arms import DPSGD, NORMEC
from .figure import Drawn, Figure
from .results import Results


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_table(results, path, [NORMEC, DPSGD])


FIGURE = Figure("tab-ef", "Final accuracies of α-NormEC without SN and of DP-SGD, no noise", fig_ef.cells, draw)
