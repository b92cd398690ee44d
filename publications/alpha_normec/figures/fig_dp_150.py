"""Appendix: DP-α-NormEC for half as many rounds: curves by β, and the highest accuracy over β and γ."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import arms, drawing, published, versus
from .arms import DP_NORMEC, DP_NORMEC_SN, DP_SHORT, DP_SHORT_SN, Arm
from .fig_dp_heatmaps import Values, grid, highest, rows_of
from .figure import Compared, Drawn, Figure, guarantee, setting
from .protocol import Protocol
from .results import Results


def short_and_full(protocol: Protocol) -> tuple[Arm, Arm]:
    return (DP_SHORT_SN, DP_NORMEC_SN) if protocol.short_server_norm else (DP_SHORT, DP_NORMEC)


def cells(protocol: Protocol) -> list[Cell]:
    short, full = short_and_full(protocol)
    found = arms.cells(protocol, short, protocol.private_betas, protocol.lrs)
    if published.SHORT_BETA in protocol.private_betas:
        found += arms.cells(protocol, full, [published.SHORT_BETA], protocol.lrs)
    return found


def draw(results: Results, path: Path) -> Drawn:
    protocol = results.protocol
    short, full = short_and_full(protocol)
    values, note = highest(results, short), setting(protocol, short)
    runs = [(beta, run) for beta, run in versus.chosen(results, short) if run is not None]
    drawing.curves_and_heatmap(
        path,
        [drawing.Line(beta, short.name, results.curve(run)) for beta, run in runs],
        {short.name: "-"},
        drawing.Table("", grid(protocol, values), "highest test accuracy, %"),
        drawing.Axes(protocol.private_betas, protocol.lrs, "β", "step size γ"),
        f"{note}; {guarantee(results, [run for _, run in runs])}",
    )
    rows = [row | {"panel": "curves"} for _, run in runs for row in versus.curve_rows(results, run)]
    rows += [row | {"panel": "heat map"} for row in rows_of(results, short, values)]
    return Drawn(note, _alike(rows), compare(results, values, full))


def compare(results: Results, values: Values, full: Arm) -> list[Compared]:
    """At β = 1 the shorter run is as good: the best over γ of each, the short less the full one."""
    beta, lrs = published.SHORT_BETA, results.protocol.lrs
    if beta not in results.protocol.private_betas:
        return []
    short = [value for (b, _), value in values.items() if b == beta and value is not None]
    long = [value for lr in lrs if (value := results.highest(results.at(full, beta, lr))) is not None]
    lead = max(short) - max(long) if short and long else None
    return [Compared("β = 1: highest accuracy, short run − full run", published.SHORT, lead)]


def _alike(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows with the same columns."""
    names = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in names} for row in rows]


FIGURE = Figure("fig-dp-150", "DP-α-NormEC for half as many rounds: curves by β, accuracy over β and γ", cells, draw)
