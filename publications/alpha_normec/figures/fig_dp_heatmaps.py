"""Figure 4: the highest test accuracy of DP-α-NormEC over β and γ, with and without server normalisation (SN)."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import arms, drawing, published
from .arms import DP_NORMEC, DP_NORMEC_SN, Arm
from .figure import Compared, Drawn, Figure, guarantee, setting
from .protocol import Protocol
from .results import Results, Row, point

Values = dict[tuple[float, float], float | None]  # by β and γ


def cells(protocol: Protocol) -> list[Cell]:
    return [
        one
        for arm in (DP_NORMEC_SN, DP_NORMEC)
        for one in arms.cells(protocol, arm, protocol.private_betas, protocol.lrs)
    ]


def highest(results: Results, arm: Arm) -> Values:
    """The highest accuracy at each (β, γ)."""
    protocol = results.protocol
    places = [(beta, lr) for beta in protocol.private_betas for lr in protocol.lrs]
    return {(beta, lr): results.highest(results.at(arm, beta, lr)) for beta, lr in places}


def rows_of(results: Results, arm: Arm, values: Values) -> list[Row]:
    return [{**point(results.at(arm, *place)), "highest_accuracy": value} for place, value in values.items()]


def grid(protocol: Protocol, values: Values) -> list[list[float | None]]:
    return [[values[beta, lr] for lr in protocol.lrs] for beta in protocol.private_betas]


def draw(results: Results, path: Path) -> Drawn:
    protocol = results.protocol
    with_sn, without = highest(results, DP_NORMEC_SN), highest(results, DP_NORMEC)
    lead: Values = {}
    for place, one in with_sn.items():
        other = without[place]
        lead[place] = None if one is None or other is None else one - other
    note, label = setting(protocol, DP_NORMEC), "highest test accuracy, %"
    drawing.heatmaps(
        path,
        [
            drawing.Table("with SN", grid(protocol, with_sn), label),
            drawing.Table("without SN", grid(protocol, without), label),
            drawing.Table("with SN − without SN", grid(protocol, lead), "difference, points", "difference"),
        ],
        drawing.Axes(protocol.private_betas, protocol.lrs, "β", "step size γ"),
        f"DP-NormEC; {note}; {guarantee(results, results.of(cells(protocol)))}",
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
    return Drawn(note, rows, compare(with_sn, without))


def compare(with_sn: Values, without: Values) -> list[Compared]:
    """The peaks, and how much the step size matters at small β."""
    return [
        Compared("peak without SN", published.PEAK, _peak(without)),
        Compared("peak with SN", published.PEAK_SN, _peak(with_sn)),
        Compared("largest spread over γ at small β, without SN", published.SPREAD, _spread(without)),
        Compared("largest spread over γ at small β, with SN", published.SPREAD_SN, _spread(with_sn)),
    ]


def _peak(values: Values) -> float | None:
    return max((value for value in values.values() if value is not None), default=None)


def _spread(values: Values) -> float | None:
    """The paper's: over γ in {0.001, 0.01, 0.1}, at β = 0.001 or 0.01, whichever spreads more."""
    spreads = []
    for beta in published.SPREAD_BETAS:
        row = [
            value for (b, lr), value in values.items() if b == beta and lr in published.SPREAD_LRS and value is not None
        ]
        if row:
            spreads.append(max(row) - min(row))
    return max(spreads, default=None)


FIGURE = Figure(
    "fig-dp-heatmaps",
    "Highest test accuracy of DP-α-NormEC over β and γ: with SN, without, and the difference",
    cells,
    draw,
)
