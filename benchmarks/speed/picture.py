"""A picture of the cost of a round: by the number of clients, or as bars for workloads with one number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normec.report.pictures import COLOURS, STYLES, figure

from .implementations import ENGINE, FLOOR, RECORD
from .results import scaling

Case = dict[str, Any]


def draw(cases: list[Case], path: Path) -> None:
    """One panel per workload and precision: lines over n, or bars if there is one n."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case["workload"], case["precision"]), []).append(case)
    tallest = max(len(case["rows"]) for case in cases)
    with figure(path, len(groups), 1.4 + 0.26 * tallest) as (_, axes):
        for axis, ((workload, precision), held) in zip(axes, groups.items(), strict=True):
            if len(held) > 1:
                _lines(axis, held)
                title = f"{workload}, {precision}"
            else:
                _bars(axis, held[0])
                title = f"{workload}, {precision}, n = {held[0]['clients']:,}"
            axis.set_title(title, fontsize=9)


def _lines(axis: Any, cases: list[Case]) -> None:
    for position, (name, points) in enumerate(scaling(cases).items()):
        colour, style = COLOURS[position % len(COLOURS)], STYLES[position % len(STYLES)]
        numbers, seconds = zip(*points, strict=True)
        milliseconds = [1e3 * value for value in seconds]
        marker = "os^"[position // len(COLOURS) % 3]
        axis.plot(numbers, milliseconds, marker=marker, markersize=3, color=colour, linestyle=style, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("clients n")
    axis.set_ylabel("ms per round")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=6)


def _bars(axis: Any, case: Case) -> None:
    timed = [row for row in case["rows"] if row["seconds"] is not None]
    rows = [row for row in timed if row["kind"] != FLOOR or row["seconds"] == case["floor"]][::-1]
    colours = [COLOURS[0] if row["kind"] in (ENGINE, RECORD) else "0.75" for row in rows]
    axis.set_axisbelow(True)
    axis.barh(range(len(rows)), [1e3 * row["seconds"] for row in rows], color=colours)
    for position, row in enumerate(rows):
        over = row["over_floor"]
        ratio = "" if over is None else f" {over:,.0f} ×" if over >= 100 else f" {over:.3g} ×"
        axis.text(1e3 * row["seconds"], position, ratio, va="center", fontsize=6)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axis.set_xscale("log")
    axis.margins(x=0.25)
    axis.set_xlabel("ms per round; × the floor")
