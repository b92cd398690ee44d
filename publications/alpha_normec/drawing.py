"""The three kinds of pictures in the paper: curves by β and method, heat maps, and tables; each as PNG and PDF."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normec.report import pictures

from .results import Curve

# The paper's colours by β (blue, green, orange, red), in tones that colour-blind readers can distinguish.
BETA_COLOURS = {0.001: "#CC79A7", 0.01: "#0072B2", 0.1: "#009E73", 1.0: "#E69F00", 10.0: "#D55E00"}
OTHER_COLOURS = ("#56B4E9", "#000000")
WIDTH = 3.4  # inches of a panel, one column of a two-column page
LETTERS = 17  # characters per inch of the note


@dataclass(frozen=True)
class Line:
    """A curve; its colour shows β, and `style` is its line style's name in the legend."""

    beta: float
    style: str
    curve: Curve


@dataclass(frozen=True)
class Table:
    """The values of a heat map; tables with the same `label` share a colour scale and its bar."""

    title: str
    values: Sequence[Sequence[float | None]]
    label: str
    kind: Literal["accuracy", "loss", "difference"] = "accuracy"


@dataclass(frozen=True)
class Axes:
    """The rows and columns of heat maps."""

    rows: Sequence[float]
    columns: Sequence[float]
    row_name: str
    column_name: str


def curves(path: Path, lines: Sequence[Line], styles: Mapping[str, Any], note: str) -> None:
    """Training loss and test accuracy, side by side."""

    def draw(sheet: Any, axes: Any) -> None:
        _curves(sheet, axes, lines, styles)

    _save(path, draw, note, columns=2, height=3.3)


def heatmaps(path: Path, tables: Sequence[Table], axes: Axes, note: str) -> None:
    """Heat maps side by side, with the values printed in the cells."""

    def draw(sheet: Any, panels: Any) -> None:
        _heatmaps(sheet, panels, tables, axes)

    width = max(2.9, 1.2 + 0.55 * len(axes.columns))
    _save(path, draw, note, columns=len(tables), height=1.35 + 0.36 * len(axes.rows), width=width)


def curves_and_heatmap(
    path: Path, lines: Sequence[Line], styles: Mapping[str, Any], table: Table, axes: Axes, note: str
) -> None:
    """Training loss, test accuracy, and a heat map of the same runs."""

    def draw(sheet: Any, panels: Any) -> None:
        _curves(sheet, panels[:2], lines, styles)
        _heatmaps(sheet, panels[2:], [table], axes)

    _save(path, draw, note, columns=3, height=3.3)


def table(path: Path, header: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], best: int, note: str) -> None:
    """A table with a rule between groups of rows; the result in row `best` is bold."""
    count = 1 + sum(map(len, groups))
    across = [0.0, 0.40, 0.52, 0.70, 0.85, 1.0]  # the left end of the first column, the right ends of the others

    def draw(_: Any, axes: Any) -> None:
        (axis,) = axes
        axis.axis("off")
        axis.set_xlim(0, 1)
        axis.set_ylim(count + 0.1, -0.6)

        def line(y: float, cells: Sequence[str], bold: Sequence[int]) -> None:
            for column, (x, text) in enumerate(zip(across, cells, strict=True)):
                side, weight = "right" if column else "left", "bold" if column in bold else "normal"
                axis.text(x, y, text, ha=side, va="center", fontweight=weight, fontsize=9)

        axis.axhline(-0.55, color="black", linewidth=1.2)
        line(0, header, range(len(header)))
        y = 1
        for group in groups:
            axis.axhline(y - 0.5, color="black", linewidth=0.7)
            for cells in group:
                line(y, cells, [3] if y - 1 == best else [])
                y += 1
        axis.axhline(y - 0.5, color="black", linewidth=1.2)

    _save(path, draw, note, columns=1, height=0.5 + 0.22 * count, width=5.4)


def _save(
    path: Path, draw: Callable[[Any, Any], None], note: str, *, columns: int, height: float, width: float = WIDTH
) -> None:
    """Save one drawing as PNG and PDF, with `note` in small print above all panels."""
    lines = textwrap.fill(note, int(columns * width * LETTERS)).splitlines()
    with pictures.figure(path.with_suffix(".png"), columns, height + 0.13 * len(lines), width) as (sheet, axes):
        draw(sheet, axes)
        sheet.suptitle("\n".join(lines), fontsize=7, color="0.35")
        sheet.savefig(path.with_suffix(".pdf"))
        sheet.set_layout_engine("none")  # the layout is already computed, and costs more than everything else


def _curves(sheet: Any, axes: Any, lines: Sequence[Line], styles: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    betas = sorted({line.beta for line in lines})
    others = iter(OTHER_COLOURS * len(betas))
    colours = {beta: BETA_COLOURS.get(beta) or next(others) for beta in betas}
    for line in lines:
        look = {"color": colours[line.beta], "linestyle": styles[line.style]}
        for axis, values in zip(axes, (line.curve.loss, line.curve.accuracy), strict=True):
            axis.plot(line.curve.rounds, [math.nan if value is None else value for value in values], **look)
    for axis, label in zip(axes, ("training loss", "test accuracy, %"), strict=True):
        axis.set_xlabel("communication round")
        axis.set_ylabel(label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[1].set_ylim(bottom=min((_settled(line.curve) for line in lines), default=0.0) - 2)
    used = [style for style in styles if any(line.style == style for line in lines)]
    first: list[Any] = [Line2D([], [], color=colours[beta], label=f"β = {beta:g}") for beta in betas]
    second: list[Any] = [Line2D([], [], color="0.3", linestyle=styles[style], label=style) for style in used]
    if len(used) < 2:
        sheet.legend(handles=first, loc="outside lower center", ncols=len(first), fontsize=8)
        return
    for short, wanted in ((first, len(second)), (second, len(first))):  # β in the upper line, styles in the lower
        short += [Line2D([], [], linestyle="", label="") for _ in range(wanted - len(short))]
    handles = [one for pair in zip(first, second, strict=True) for one in pair]
    sheet.legend(handles=handles, loc="outside lower center", ncols=len(first), fontsize=8)


def _settled(curve: Curve) -> float:
    """The smallest accuracy after the first tenth of a run; the untrained start would compress the axis."""
    pairs = list(zip(curve.rounds, curve.accuracy, strict=True))
    found = [value for k, value in pairs if value is not None and k >= max(1, pairs[-1][0] / 10)]
    return min(found, default=0.0)


def _heatmaps(sheet: Any, panels: Any, tables: Sequence[Table], axes: Axes) -> None:
    for label in dict.fromkeys(one.label for one in tables):
        group = [(axis, one) for axis, one in zip(panels, tables, strict=True) if one.label == label]
        norm = _norm([one for _, one in group])
        for axis, one in group:
            shown = pictures.paint(
                axis,
                one.values,
                axes.rows,
                axes.columns,
                norm=norm,
                format={"accuracy": ".2f", "loss": ".3g", "difference": "+.2f"}[one.kind],
                best={"accuracy": "max", "loss": "min", "difference": None}[one.kind],
                colours="PuOr" if one.kind == "difference" else "cividis_r" if one.kind == "loss" else "cividis",
            )
            axis.set_title(one.title, fontsize=9)
            axis.set_xlabel(axes.column_name)
        group[0][0].set_ylabel(axes.row_name)
        sheet.colorbar(shown, ax=[axis for axis, _ in group], label=label, pad=0.02)


def _norm(tables: Sequence[Table]) -> Any:
    """One colour scale for these tables: symmetric for differences, logarithmic for losses."""
    from matplotlib.colors import LogNorm, Normalize

    known = [value for one in tables for row in one.values for value in row if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if tables[0].kind == "difference":
        most = max(abs(low), abs(high)) or 1.0
        return Normalize(-most, most)
    if tables[0].kind == "loss" and 0 < low < high:
        return LogNorm(low, high)
    return Normalize(low, high if high > low else low + 1)
