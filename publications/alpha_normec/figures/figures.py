"""All figures and tables, in the paper's order, and how they are made: first the runs, each once, then the pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from normec.errors import one_of
from normec.experiments.grid import Cell
from normec.experiments.sweep import Event, Outcome, run_cells

from . import (
    fig_clip,
    fig_dp_150,
    fig_dp_clip,
    fig_dp_curves,
    fig_dp_heatmaps,
    fig_ef,
    fig_heatmap,
    fig_heatmaps_other,
    fig_params,
    fig_sn,
    figure,
    tab_clip,
    tab_ef,
    tab_sn,
)
from .figure import Figure, Made
from .protocol import Protocol
from .results import Results

FIGURES: tuple[Figure, ...] = tuple(
    module.FIGURE
    for module in (
        *(fig_params, fig_heatmap, fig_ef, tab_ef, fig_dp_heatmaps, fig_dp_clip, fig_dp_curves),
        *(fig_heatmaps_other, tab_sn, fig_sn, tab_clip, fig_clip, fig_dp_150),
    )
)
ALL = "all"


def named(names: Sequence[str]) -> list[Figure]:
    """Figures by name, or all of them."""
    for name in names:
        one_of([*(one.name for one in FIGURES), ALL], figure=name)
    return [one for one in FIGURES if one.name in names or ALL in names]


def cells(figures: Sequence[Figure], protocol: Protocol) -> list[Cell]:
    """The runs of several figures, each once."""
    return list({cell.config.digest(): cell for one in figures for cell in one.cells(protocol)}.values())


def reproduce(
    figures: Sequence[Figure],
    protocol: Protocol,
    folder: Path,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    threads: int | None = None,
) -> tuple[list[Made], list[Outcome]]:
    """Run what is missing in `folder`/cells, then draw; nothing is drawn where runs failed, which are then told."""
    outcomes = run_cells(cells(figures, protocol), folder, jobs, on_event, threads=threads)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        return [], failed
    results = Results(protocol, outcomes)
    made = [figure.make(one, results, folder) for one in figures]
    figure.index(FIGURES, folder)
    return made, []
