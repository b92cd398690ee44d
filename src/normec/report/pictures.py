"""Figures of results in one style: colour-blind safe, and legible in a two-column paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import UsageError, needed, one_of
from ..storage.history import NOT_COVERED, History, uncovered
from ..system.files import writing
from .spread import Spread, over_seeds

# Okabe & Ito's colours, told apart under every common colour blindness; line styles and markers tell them
# apart in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

Panel = tuple[str, str, str]  # column of the history, label of the axis, its scale
PANELS: tuple[Panel, ...] = (
    ("grad_norm", "gradient norm ‖∇f(x)‖", "log"),
    ("loss", "training loss f(x)", "log"),
    ("accuracy", "test accuracy, %", "linear"),
)
HEALTH: tuple[Panel, ...] = (
    ("epsilon", "ε spent", "linear"),
    ("memory_error", "memory error, mean ‖∇f_i − g_i‖", "log"),
    ("message_norm", "message norm, mean ‖Ψ‖", "log"),
    ("disagreement", "disagreement, √ mean ‖∇f_i − ∇f‖²", "log"),
)


ACROSS = 4  # panels in a row of `curves`


@contextmanager
def figure(path: Path | None, columns: int, height: float = 2.6, width: float = 3.4, rows: int = 1) -> Iterator[Any]:
    """Panels, row by row, `width` inches each, the whole `height` high.

    Saved to `path`, if there is one (the suffix decides the format), when the block ends.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.6,
        "legend.frameon": False,
        "pdf.fonttype": 42,
    }
    with mpl.rc_context(style):
        sheet = Figure(figsize=(width * columns, height), layout="constrained")
        yield sheet, sheet.subplots(rows, columns, squeeze=False).reshape(-1)
        if path is not None:
            with writing(path):
                sheet.savefig(path, dpi=160)


def measured(histories: Sequence[History], panels: Sequence[Panel] = PANELS) -> bool:
    """Whether some history has something to draw in one of the panels."""
    return any(one[column] for one in histories for column, _, _ in panels)


def history_figure(history: History, path: str | Path | None = None, columns: Sequence[str] | None = None) -> Any:
    """Draw the history of one run, one panel per column.

    Args:
        history: The rows of the run.
        path: Where to save the figure (default: nowhere).
        columns: The columns to draw (default: all results that were measured).

    Returns:
        The matplotlib figure.

    Raises:
        UsageError: matplotlib is missing, or the history has no such column.
    """
    needed("matplotlib", "report")
    held = dict.fromkeys(name for row in history for name, value in row.items() if value is not None)
    if columns is None:
        hidden = ("round", "messages", "bytes", *(name for name, _, _ in HEALTH if name != "epsilon"))
        columns = [name for name in held if name not in hidden and not name.startswith("message_norm")]
    for name in columns:
        one_of(held, column=name)
    known = {panel[0]: panel for panel in (*PANELS, *HEALTH)}
    panels = [known.get(name, (name, _label(name), "log" if "loss" in name else "linear")) for name in columns]
    return curves({"": history}, Path(path) if path is not None else None, panels=panels)


def _label(column: str) -> str:
    return column.replace("_", " ") + (", %" if "accuracy" in column else "")


def curves(
    histories: Mapping[str, History | Sequence[History]],
    path: Path | None,
    title: str = "",
    *,
    spread: Spread = "range",
    panels: Sequence[Panel] = PANELS,
) -> Any:
    """Draw one line per name in each panel that has data, and return the matplotlib figure.

    Several histories under one name are seeds: the line is their mean, the band around it one standard deviation
    either way ("deviation"), or from the least to the greatest ("range"); with "none" there is no band.
    """
    one_of(get_args(Spread), spread=spread)
    seeds = {name: [held] if isinstance(held, History) else list(held) for name, held in histories.items()}
    drawn = [panel for panel in panels if measured([one for group in seeds.values() for one in group], [panel])]
    if not drawn:
        raise UsageError(f"no history has any of {', '.join(panel[0] for panel in panels)}; there is nothing to draw")
    rows = math.ceil(len(drawn) / ACROSS)
    with figure(path, min(len(drawn), ACROSS), 2.9 * rows, rows=rows) as (sheet, axes):
        for axis in axes[len(drawn) :]:
            axis.remove()
        for axis, (column, label, scale) in zip(axes, drawn, strict=False):
            factor = 100 if "accuracy" in column else 1
            for position, (name, group) in enumerate(seeds.items()):
                band = over_seeds(group, column, spread)
                colour, style = COLOURS[position % len(COLOURS)], STYLES[position % len(STYLES)]
                middle, low, high = ([factor * value for value in row] for row in (band.mean, band.low, band.high))
                axis.plot(band.rounds, middle, color=colour, linestyle=style, label=name)
                if spread != "none" and len(group) > 1:
                    axis.fill_between(band.rounds, low, high, color=colour, alpha=0.18, linewidth=0)
            axis.set_yscale(scale)
            if factor == 100:  # the untrained start would squeeze everything else into the top
                settled = (_settled(one, column) for group in seeds.values() for one in group)
                axis.set_ylim(bottom=factor * min(settled) - 2)
            axis.set_xlabel("round")
            private = any(column in uncovered(row) for group in seeds.values() for one in group for row in one)
            axis.set_ylabel(f"{label}\n(private runs: {NOT_COVERED})" if private else label)
        handles, names = axes[0].get_legend_handles_labels()
        if any(names):
            sheet.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)))
        if title:
            sheet.suptitle(title, fontsize=10)
    return sheet


def heatmap(
    tables: Mapping[str, Sequence[Sequence[float | None]]],
    path: Path,
    *,
    rows: Sequence[object],
    columns: Sequence[object],
    y_label: str,
    x_label: str,
    label: str,
    format: str = ".3g",
    scale: Literal["linear", "log"] = "linear",
    best: Literal["max", "min"] | None = None,
    missing: str = "–",
) -> None:
    """Draw tables of values as heat maps, side by side on one scale of colours; rows run from the top.

    `tables` are given by title ("" for none). `best` frames the best value of each; None and NaN are grey cells that
    say `missing`.
    """
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    grids = {title: np.array(values, dtype=float) for title, values in tables.items()}  # None becomes NaN
    for grid in grids.values():
        if grid.shape != (len(rows), len(columns)):
            raise UsageError(f"a heat map of {len(rows)} × {len(columns)} cells got values of shape {grid.shape}")
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    if scale == "log":
        known = known[known > 0]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    norm = (LogNorm if scale == "log" else Normalize)(low, high if high > low else low + abs(low) * 1e-6 + 1e-12)
    with figure(path, len(grids), max(2.2, 0.9 + 0.36 * len(rows)), max(3.4, 1.3 + 0.56 * len(columns))) as (
        sheet,
        axes,
    ):
        for axis, (title, grid) in zip(axes, grids.items(), strict=True):
            shown = paint(axis, grid, rows, columns, norm=norm, format=format, best=best, missing=missing)
            axis.set_xlabel(x_label)
            axis.set_title(title, fontsize=9)
        axes[0].set_ylabel(y_label)
        sheet.colorbar(shown, ax=list(axes), label=label, pad=0.02)


def paint(
    axis: Any,
    values: Any,
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    norm: Any,
    format: str,
    best: Literal["max", "min"] | None = None,
    missing: str = "–",
    colours: str = "cividis",
) -> Any:
    """Draw one table of a heat map, each value printed in its cell; returns the image, for a colour bar."""
    import numpy as np
    from matplotlib.patches import Rectangle

    grid = np.array(values, dtype=float)
    shown = axis.imshow(np.ma.masked_invalid(grid), cmap=colours, norm=norm, aspect="auto")
    axis.set_facecolor("0.88")
    axis.grid(False)
    winner = None
    if best is not None and np.isfinite(grid).any():
        winner = np.unravel_index((np.nanargmax if best == "max" else np.nanargmin)(grid), grid.shape)
    for (i, j), value in np.ndenumerate(grid):
        text = f"{value:{format}}" if np.isfinite(value) else missing
        ink = _ink(shown.to_rgba(value)) if np.isfinite(value) else "0.35"
        weight = "bold" if (i, j) == winner else "normal"
        axis.text(j, i, text, ha="center", va="center", color=ink, fontsize=8, fontweight=weight)
    if winner is not None:
        corner = (winner[1] - 0.47, winner[0] - 0.47)
        axis.add_patch(Rectangle(corner, 0.94, 0.94, fill=False, edgecolor="#D55E00", linewidth=2))
    axis.set_xticks(range(len(columns)), [_name(value) for value in columns])
    axis.set_yticks(range(len(rows)), [_name(value) for value in rows])
    axis.spines[:].set_visible(False)
    return shown


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    title: str = "",
) -> None:
    """Draw one panel on logarithmic axes, with one line per series."""
    with figure(path, 1, 4.2) as (sheet, (axis,)):
        for position, (name, (xs, ys)) in enumerate(series.items()):
            axis.plot(
                xs, ys, color=COLOURS[position % len(COLOURS)], linestyle=STYLES[position % len(STYLES)], label=name
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        sheet.legend(loc="outside lower center", ncols=2, fontsize=7)
        if title:
            axis.set_title(title, fontsize=8)


def _settled(history: History, column: str) -> float:
    """The smallest value after the first tenth of the run."""
    pairs = list(zip(history.rounds(column), history[column], strict=True))
    return min((value for k, value in pairs if k >= pairs[-1][0] / 10), default=0.0)


def _ink(colour: Sequence[float]) -> str:
    """Black or white, whichever reads better on a colour (red, green, blue, …)."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3])
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def _name(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
