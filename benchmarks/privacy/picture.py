"""Accuracy over ε, one panel per study and split: error feedback with solid lines, DP-SGD with dashed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normec.report import pictures

from .records import Record
from .search_space import SEARCH_SPACES
from .studies import EPSILONS, SPLITS, STUDIES

ACROSS = 4  # studies per picture, at most
WIDTH, HEIGHT = 2.5, 2.3  # of a panel, inches
LEGEND = {1: 1, 2: 3, 3: 3, 4: 6}  # columns of the legend, by the number of studies
MARKS = "os^Dvx"


def draw(held: Mapping[str, Sequence[Record]], folder: Path) -> list[Path]:
    """Draw the studies that have run in as few pictures as possible, with about the same number in each."""
    ran = [name for name in STUDIES if held[name]]
    across = math.ceil(len(ran) / max(1, math.ceil(len(ran) / ACROSS)))
    found = []
    for number, begin in enumerate(range(0, len(ran), max(1, across)), 1):
        names, path = ran[begin : begin + across], folder / f"accuracy-{number}.png"
        panels = [(name, split) for split in SPLITS for name in names]
        with pictures.figure(path, len(names), HEIGHT * len(SPLITS) + 0.5, WIDTH, len(SPLITS)) as (sheet, axes):
            for axis, (name, split) in zip(axes, panels, strict=True):
                _panel(axis, [one for one in held[name] if one["split"] == split], f"{name}, {split}")
                axis.set_ylabel(f"test {'area' if STUDIES[name].budget.by == 'area' else 'accuracy'}, %", fontsize=8)
            handles, labels = axes[0].get_legend_handles_labels()
            sheet.legend(handles, labels, loc="outside lower center", ncols=LEGEND[len(names)], fontsize=8)
        found.append(path)
    return found


def _panel(axis: Any, records: Sequence[Record], title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(EPSILONS, [f"ε = {one:g}" for one in EPSILONS], fontsize=7)
    axis.set_xlim(0.8 * min(EPSILONS), 1.25 * max(EPSILONS))
    axis.minorticks_off()
    for position, (name, space) in enumerate(SEARCH_SPACES.items()):
        own = sorted((one for one in records if one["method"] == name), key=lambda one: float(one["epsilon"]))
        axis.errorbar(
            [one["epsilon"] * 2 ** (0.05 * (position - 2.5)) for one in own],  # side by side
            [100 * one["accuracy"] for one in own],
            [100 * one["spread"] for one in own],
            color=pictures.COLOURS[position], linestyle="-" if space.error_feedback else "--", linewidth=1.2,
            marker=MARKS[position], markersize=3.5, capsize=1.5, elinewidth=0.7, label=name,
        )  # fmt: skip
