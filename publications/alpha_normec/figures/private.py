"""Private runs over β and γ: fig-dp-heatmaps, fig-dp-clip, fig-dp-curves, fig-dp-150."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normec.experiments.export import Row

from .. import drawing, published
from ..methods import DP_CLIP21, DP_NORMEC, DP_NORMEC_SN, PaperMethod
from ..plan import Cell, private_cell
from ..protocol import Protocol
from ..results import Results
from . import method_pairs
from .figure import Comparison, Drawn, Figure, guarantee, point, setting

Values = dict[tuple[float, float], float | None]  # by β and γ
CURVES = (DP_CLIP21, DP_NORMEC, DP_NORMEC_SN)
STYLES = {DP_CLIP21.name: "-", DP_NORMEC.name: "--", DP_NORMEC_SN.name: ":"}  # as in the paper
LABEL = "highest test accuracy, %"


def grid_cells(protocol: Protocol, method: PaperMethod, short: bool = False) -> dict[tuple[float, float], Cell]:
    """The cells of a method by (β, γ)."""
    return {
        (beta, lr): private_cell(protocol, method, beta, lr, full_length=not short)
        for beta in protocol.private_betas
        for lr in protocol.private_lrs
    }


def all_cells(protocol: Protocol, methods: Sequence[PaperMethod]) -> list[Cell]:
    return [one for method in methods for one in grid_cells(protocol, method).values()]


def highest(results: Results, method: PaperMethod, short: bool = False) -> Values:
    """The highest accuracy at each (β, γ)."""
    cells = grid_cells(results.base, method, short)
    return {pair: results.highest(cell, results.base.column) for pair, cell in cells.items()}


def rows_of(results: Results, method: PaperMethod, values: Values, short: bool = False) -> list[Row]:
    cells = grid_cells(results.base, method, short)
    return [{**point(results, cells[pair]), "highest_accuracy": value} for pair, value in values.items()]


def grid(protocol: Protocol, values: Values) -> list[list[float | None]]:
    """β down, γ across."""
    return [[values[beta, lr] for lr in protocol.private_lrs] for beta in protocol.private_betas]


def axes(protocol: Protocol, beta: str = "β") -> drawing.Axes:
    return drawing.Axes(protocol.private_betas, protocol.private_lrs, beta, "step size γ")


def heatmaps_cells(protocol: Protocol) -> list[Cell]:
    return all_cells(protocol, (DP_NORMEC_SN, DP_NORMEC))


def draw_heatmaps(results: Results, path: Path) -> Drawn:
    """Figure 4: the highest test accuracy of DP-α-NormEC with and without server normalisation (SN)."""
    protocol = results.base
    with_sn, without = highest(results, DP_NORMEC_SN), highest(results, DP_NORMEC)
    lead: Values = {}
    for pair, one in with_sn.items():
        other = without[pair]
        lead[pair] = None if one is None or other is None else one - other
    note = setting(protocol, DP_NORMEC)
    drawing.heatmaps(
        path,
        [
            drawing.Table("with SN", grid(protocol, with_sn), LABEL),
            drawing.Table("without SN", grid(protocol, without), LABEL),
            drawing.Table("with SN − without SN", grid(protocol, lead), "difference, points", "difference"),
        ],
        axes(protocol),
        f"DP-NormEC; {note}; {guarantee(results, heatmaps_cells(protocol))}",
    )
    rows = rows_of(results, DP_NORMEC_SN, with_sn) + rows_of(results, DP_NORMEC, without)
    rows += [
        {
            "method": "difference",
            "alpha": protocol.alpha,
            "beta": beta,
            "lr": lr,
            "digest": None,
            "highest_accuracy": value,
        }
        for (beta, lr), value in lead.items()
    ]
    return Drawn(note, rows, compare_heatmaps(with_sn, without))


def compare_heatmaps(with_sn: Values, without: Values) -> list[Comparison]:
    """The peaks, and the effect of the step size at small β."""
    return [
        Comparison("peak without SN", published.PEAK, _peak(without)),
        Comparison("peak with SN", published.PEAK_SN, _peak(with_sn)),
        Comparison("largest spread over γ at small β, without SN", published.SPREAD, _spread(without)),
        Comparison("largest spread over γ at small β, with SN", published.SPREAD_SN, _spread(with_sn)),
    ]


def _peak(values: Values) -> float | None:
    return max((value for value in values.values() if value is not None), default=None)


def _spread(values: Values) -> float | None:
    """The largest spread over γ in {0.001, 0.01, 0.1} at β = 0.001 or 0.01, as in the paper."""
    spreads = []
    for beta in published.SPREAD_BETAS:
        row = [
            value for (b, lr), value in values.items() if b == beta and lr in published.SPREAD_LRS and value is not None
        ]
        if row:
            spreads.append(max(row) - min(row))
    return max(spreads, default=None)


def clip_cells(protocol: Protocol) -> list[Cell]:
    return all_cells(protocol, (DP_CLIP21,))


def draw_clip(results: Results, path: Path) -> Drawn:
    """Figure 5: the highest test accuracy of DP-Clip21 over its threshold, which the paper calls β, and γ."""
    protocol = results.base
    values, note = highest(results, DP_CLIP21), setting(protocol, DP_CLIP21)
    drawing.heatmaps(
        path,
        [drawing.Table("DP-Clip21", grid(protocol, values), LABEL)],
        axes(protocol, "β (threshold)"),
        f"{note}; {guarantee(results, clip_cells(protocol))}",
    )
    return Drawn(note, rows_of(results, DP_CLIP21, values))


def curve_cells(protocol: Protocol) -> list[Cell]:
    return method_pairs.cells(protocol, CURVES)


def draw_curves(results: Results, path: Path) -> Drawn:
    """Figure 6: loss and accuracy of DP-Clip21 and of DP-α-NormEC with and without server normalisation."""
    drawn = method_pairs.draw_curves(results, path, CURVES, STYLES)
    return Drawn(drawn.setting, drawn.rows, compare_curves(results))


def compare_curves(results: Results) -> list[Comparison]:
    """The text on the curves, as leads in mean accuracy over the rounds: a higher mean is faster convergence."""
    pairs = [(beta, DP_NORMEC, DP_CLIP21) for beta in published.FASTER_BETAS]
    pairs += [(published.SURVIVES_BETA, DP_NORMEC_SN, other) for other in (DP_NORMEC, DP_CLIP21)]
    means = {(method.name, beta): value for method in CURVES for beta, value in _means(results, method).items()}
    found = []
    for beta, one, other in pairs:
        ours = means.get((one.name, beta)), means.get((other.name, beta))
        lead = None if ours[0] is None or ours[1] is None else ours[0] - ours[1]
        what = f"{one.name} − {other.name}, β = {beta:g}, mean accuracy over the rounds"
        found.append(Comparison(what, published.FASTER, lead))
    return found


def _means(results: Results, method: PaperMethod) -> dict[float, float | None]:
    """By β; None if no step size finished."""
    found: dict[float, float | None] = {}
    for beta, run in method_pairs.chosen(results, method):
        values = [value for value in results.curve(run).accuracy if value is not None] if run is not None else []
        found[beta] = sum(values) / len(values) if values else None
    return found


def _short_method(protocol: Protocol) -> PaperMethod:
    return DP_NORMEC_SN if protocol.short_server_norm else DP_NORMEC


def short_cells(protocol: Protocol) -> list[Cell]:
    method = _short_method(protocol)
    full = [cell for (beta, _), cell in grid_cells(protocol, method).items() if beta == published.SHORT_BETA]
    return [*grid_cells(protocol, method, short=True).values(), *full]


def draw_short(results: Results, path: Path) -> Drawn:
    """Appendix: DP-α-NormEC for half as many rounds."""
    protocol, method = results.base, _short_method(results.base)
    values, note = highest(results, method, short=True), setting(protocol, method, short=True)
    runs = [(beta, run) for beta, run in method_pairs.chosen(results, method, short=True) if run is not None]
    drawing.curves_and_heatmap(
        path,
        [drawing.Line(beta, method.name, results.curve(run)) for beta, run in runs],
        {method.name: "-"},
        drawing.Table("", grid(protocol, values), LABEL),
        axes(protocol),
        f"{note}; {guarantee(results, [run for _, run in runs])}",
    )
    rows = [row | {"panel": "curves"} for _, run in runs for row in method_pairs.curve_rows(results, run)]
    rows += [row | {"panel": "heat map"} for row in rows_of(results, method, values, short=True)]
    columns = dict.fromkeys(key for row in rows for key in row)
    alike = [{key: row.get(key) for key in columns} for row in rows]
    return Drawn(note, alike, compare_short(results, values, highest(results, method)))


def compare_short(results: Results, short: Values, full: Values) -> list[Comparison]:
    """At β = 1 the short run is as good: the best over γ of the short runs minus that of the full ones."""
    if published.SHORT_BETA not in results.base.private_betas:
        return []
    ours = [
        max((v for (b, _), v in values.items() if b == published.SHORT_BETA and v is not None), default=None)
        for values in (short, full)
    ]
    lead = ours[0] - ours[1] if ours[0] is not None and ours[1] is not None else None
    return [Comparison("β = 1: highest accuracy, short run − full run", published.SHORT, lead)]


HEATMAPS = Figure(
    "fig-dp-heatmaps",
    "Highest test accuracy of DP-α-NormEC over β and γ: with SN, without SN, and the difference",
    heatmaps_cells,
    draw_heatmaps,
)
CLIP = Figure("fig-dp-clip", "Highest test accuracy of DP-Clip21 over β and γ", clip_cells, draw_clip)
DP_CURVES = Figure(
    "fig-dp-curves", "Training loss and test accuracy of DP-Clip21 and DP-α-NormEC, by β", curve_cells, draw_curves
)
SHORT = Figure(
    "fig-dp-150",
    "DP-α-NormEC for half as many rounds: curves by β, accuracy over β and γ",
    short_cells,
    draw_short,
)
