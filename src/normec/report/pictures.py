"""Pictures of results: colour-blind safe, legible in a two-column paper, the same style everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..history import History

# Okabe & Ito's colours, told apart under every common colour blindness; line styles and markers tell them
# apart in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

PANELS = (
    ("grad_norm", "gradient norm ‖∇f(x)‖", "log"),
    ("loss", "training loss f(x)", "log"),
    ("accuracy", "test accuracy, %", "linear"),
)


@contextmanager
def figure(path: Path, columns: int, height: float = 2.6) -> Iterator[Any]:
    """A row of panels, saved to `path` (the suffix decides the format) when the block ends."""
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
        sheet = Figure(figsize=(3.4 * columns, height), layout="constrained")
        yield sheet, sheet.subplots(1, columns, squeeze=False)[0]
        sheet.savefig(path, dpi=160)


def curves(histories: Mapping[str, History], path: Path, title: str = "") -> None:
    """One line a run in each panel that has data: gradient norm, training loss, test accuracy over rounds."""
    panels = [panel for panel in PANELS if any(history[panel[0]] for history in histories.values())]
    with figure(path, len(panels), 2.9) as (sheet, axes):
        for axis, (column, label, scale) in zip(axes, panels, strict=True):
            factor = 100 if column == "accuracy" else 1
            for position, (name, history) in enumerate(histories.items()):
                values = [factor * value for value in history[column]]
                colour, style = COLOURS[position % len(COLOURS)], STYLES[position % len(STYLES)]
                axis.plot(history.rounds(column), values, color=colour, linestyle=style, label=name)
            axis.set_yscale(scale)
            if scale == "linear":  # the untrained start would squeeze everything else into the top
                axis.set_ylim(bottom=min(factor * _settled(history, column) for history in histories.values()) - 2)
            axis.set_xlabel("round")
            axis.set_ylabel(label)
        handles, names = axes[0].get_legend_handles_labels()
        sheet.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)))
        if title:
            sheet.suptitle(title, fontsize=10)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    title: str = "",
) -> None:
    """One panel on logarithmic axes, one line a series."""
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
