"""Appendix: best step sizes and final accuracies of Clip21 against α-NormEC without server normalisation."""

from __future__ import annotations

from pathlib import Path

from . import fig_clip, versus
from .arms import CLIP21, NORMEC
from .figure import Drawn, Figure
from .results import Results


def draw(results: Results, path: Path) -> Drawn:
    return versus.draw_table(results, path, [CLIP21, NORMEC])


FIGURE = Figure("tab-clip", "Final accuracies of Clip21 and of α-NormEC without SN, no noise", fig_clip.cells, draw)
