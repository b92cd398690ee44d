"""Who wins where: conditions by their noise and their split, in the colour of the best method's family."""

from __future__ import annotations

import math
from pathlib import Path

from normec.report import pictures

from .conditions import Conditions, noise
from .contenders import ALL
from .page import FAMILIES, values
from .statistics import compare

WIDTH, HEIGHT = 7.5, 3.6  # inches
SPLITS = {"iid": "clients alike", "label": "clients sorted by label"}


def draw(conditions: Conditions, path: Path) -> Path:
    """Draw the picture; a mark is full if no method of another family is close to the best, and hollow otherwise."""
    studies = list(dict.fromkeys(condition.study for condition in conditions))
    colours = dict(zip(FAMILIES, pictures.COLOURS, strict=False))
    with pictures.figure(path, 2, HEIGHT, WIDTH / 2, 1) as (sheet, axes):
        for axis, (split, title) in zip(axes, SPLITS.items(), strict=True):
            axis.set_title(title, fontsize=9)
            axis.set_xscale("log")
            axis.set_xlabel("noise √d / (μn)", fontsize=8)
            axis.set_yticks(range(len(studies)), studies, fontsize=7)
            axis.set_ylim(-0.6, len(studies) - 0.4)
            axis.invert_yaxis()
            for condition, own in conditions.items():
                amount = noise(own)
                if condition.split != split or math.isnan(amount):
                    continue
                comparison = compare(values(own))
                family = ALL[comparison.best].family
                sure = all(ALL[name].family == family for name in comparison.tied())
                axis.plot(
                    amount, studies.index(condition.study), "o", markersize=8, color=colours[family],
                    markerfacecolor=colours[family] if sure else "white", markeredgewidth=1.5,
                )  # fmt: skip
        for family, shown in FAMILIES.items():
            axes[0].plot([], [], "o", color=colours[family], label=shown)
        axes[0].plot([], [], "o", color="grey", markerfacecolor="white", label="not significantly better than others")
        handles, labels = axes[0].get_legend_handles_labels()
        sheet.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)
    return path
