"""All figures and tables in the order of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normec.errors import one_of

from ..plan import Cell
from ..protocol import Protocol
from ..results import Results
from . import alpha_beta, figure, method_pairs, private
from .figure import Figure, Made

FIGURES: tuple[Figure, ...] = (
    *(alpha_beta.PARAMS, alpha_beta.HEATMAP, *method_pairs.EF),
    *(private.HEATMAPS, private.CLIP, private.DP_CURVES),
    *(alpha_beta.OTHER_HEATMAPS, *method_pairs.SN, *method_pairs.CLIP, private.SHORT),
)
ALL = "all"


def named(names: Sequence[str]) -> list[Figure]:
    """Figures by name, or all of them."""
    for name in names:
        one_of([*(one.name for one in FIGURES), ALL], figure=name)
    return [one for one in FIGURES if one.name in names or ALL in names]


def cells(figures: Sequence[Figure], protocol: Protocol) -> list[Cell]:
    """The cells of several figures, each once."""
    return list({cell.name: cell for one in figures for cell in one.cells(protocol)}.values())


def draw(figures: Sequence[Figure], results: Results, folder: Path) -> list[Made]:
    """Draw figures whose cells all have records, and write the index of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [figure.make(one, results, folder) for one in figures]
    figure.index(FIGURES, folder)
    return made
