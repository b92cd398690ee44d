"""Appendix: best step sizes and final accuracies of α-NormEC with and without server normalisation."""

from __future__ import annotations

from pathlib import Path

from . import fig_sn, versus
from .arms import NORMEC, NORMEC_SN
from .figure import Drawn, Figure
from .results import Results


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_table(results, path, [NORMEC_SN, NORMEC])


FIGURE = Figure("tab-sn", "Final accuracies of α-NormEC with and without SN, no noise", fig_sn.cells, draw)
