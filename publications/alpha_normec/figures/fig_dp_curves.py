"""Figure 6: loss and accuracy of DP-Clip21 and of DP-α-NormEC with and without server normalisation, by β."""

from __future__ import annotations

from pathlib import Path

from normec.experiments.grid import Cell

from . import published, versus
from .arms import DP_CLIP21, DP_NORMEC, DP_NORMEC_SN, Arm
from .figure import Compared, Drawn, Figure
from .protocol import Protocol
from .results import Results

ARMS = (DP_CLIP21, DP_NORMEC, DP_NORMEC_SN)
STYLES = {DP_CLIP21.name: "-", DP_NORMEC.name: "--", DP_NORMEC_SN.name: ":"}  # as in the paper


def cells(protocol: Protocol) -> list[Cell]:
    return versus.cells(protocol, ARMS)


def draw(results: Results, path: Path) -> Drawn:
    drawn = versus.draw_curves(results, path, ARMS, STYLES)
    return Drawn(drawn.setting, drawn.rows, compare(results))


def compare(results: Results) -> list[Compared]:
    """What the text says of the curves, as leads in mean accuracy over the rounds: higher is faster."""
    pairs = [(beta, DP_NORMEC, DP_CLIP21) for beta in published.FASTER_BETAS]
    pairs += [(published.SURVIVES_BETA, DP_NORMEC_SN, other) for other in (DP_NORMEC, DP_CLIP21)]
    means = {(arm.name, beta): value for arm in ARMS for beta, value in _means(results, arm).items()}
    found = []
    for beta, one, other in pairs:
        ours = means.get((one.name, beta)), means.get((other.name, beta))
        lead = None if ours[0] is None or ours[1] is None else ours[0] - ours[1]
        what = f"{one.name} − {other.name}, β = {beta:g}, mean accuracy over the rounds"
        found.append(Compared(what, published.FASTER, lead))
    return found


def _means(results: Results, arm: Arm) -> dict[float, float | None]:
    """By β; None where no step size came through."""
    found: dict[float, float | None] = {}
    for beta, run in versus.chosen(results, arm):
        values = [value for value in results.curve(run).accuracy if value is not None] if run is not None else []
        found[beta] = sum(values) / len(values) if values else None
    return found


FIGURE = Figure("fig-dp-curves", "Training loss and test accuracy of DP-Clip21 and DP-α-NormEC, by β", cells, draw)
