"""Who wins where: conditions by their noise and their split, in the colour of the best method's family.

Conditions without noise are a column of their own, from clients that are alike to clients of one class each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from normec.report import pictures

from .conditions import Conditions, leading_family, noise
from .contenders import ALL
from .page import FAMILIES, values
from .records import Record
from .statistics import compare
from .studies import Condition

WIDTH, HEIGHT = 10.5, 4.4  # inches
NO_NOISE, ALIKE, DIFFERENT = PANELS = "no noise", "noise, clients alike", "noise, clients differ"
SPLITS = {
    "iid": "alike",
    "dirichlet 1": "Dirichlet 1",
    "dirichlet 0.3": "0.3",
    "dirichlet 0.1": "0.1",
    "label": "label",
    "role": "role",
}


def position_of(condition: Condition, records: Mapping[str, Record]) -> tuple[str, float]:
    """The panel of a condition, and its position on the axis: its split without noise, and its noise otherwise."""
    if not condition.private:
        return NO_NOISE, list(SPLITS).index(condition.split)
    return ALIKE if condition.split == "iid" else DIFFERENT, noise(records)


def draw(conditions: Conditions, path: Path) -> Path:
    """Draw the picture; a mark is full if no method of another family is close to the best, and hollow otherwise."""
    studies = list(dict.fromkeys(condition.study for condition in conditions))
    colours = dict(zip(FAMILIES, pictures.COLOURS, strict=False))
    with pictures.figure(path, len(PANELS), HEIGHT, WIDTH / len(PANELS), 1) as (sheet, axes):
        by_panel = dict(zip(PANELS, axes, strict=True))
        for panel, axis in by_panel.items():
            axis.set_title(panel, fontsize=9)
            axis.set_yticks(range(len(studies)), studies if panel == NO_NOISE else [""] * len(studies), fontsize=7)
            axis.set_ylim(-0.6, len(studies) - 0.4)
            axis.invert_yaxis()
            if panel == NO_NOISE:
                shown = 1 + max(
                    (position_of(one, own)[1] for one, own in conditions.items() if not one.private), default=0
                )
                axis.set_xticks(range(int(shown)), list(SPLITS.values())[: int(shown)], fontsize=7, rotation=30)
                axis.set_xlim(-0.5, shown - 0.5)
                axis.set_xlabel("clients", fontsize=8)
            else:
                axis.set_xscale("log")
                axis.set_xlabel("noise √d / (μn)", fontsize=8)
        for condition, own in conditions.items():
            panel, position = position_of(condition, own)
            if not math.isnan(position):
                comparison = compare(values(own))
                family = ALL[comparison.best].family
                sure = leading_family(condition, comparison) == family
                by_panel[panel].plot(
                    position, studies.index(condition.study), "o", markersize=8, color=colours[family],
                    markerfacecolor=colours[family] if sure else "white", markeredgewidth=1.5,
                )  # fmt: skip
        for family, label in FAMILIES.items():
            axes[0].plot([], [], "o", color=colours[family], label=label)
        axes[0].plot([], [], "o", color="grey", label="full: significantly better than the other families")
        axes[0].plot(
            [], [], "o", color="grey", markerfacecolor="white",
            label="hollow: the lead may be chance, or some methods have not run",
        )  # fmt: skip
        handles, labels = axes[0].get_legend_handles_labels()
        sheet.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return path
