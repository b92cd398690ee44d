"""The pictures of the pages: curves and heat maps of the cells that have run."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normec.report import pictures

from .. import drawing
from ..drawing import Axes, Table
from ..methods import PRIVATE_METHODS, TABLE_METHODS
from ..plan import NOISES, Cell
from ..published import SHORT_BETA
from ..results import Results
from . import alpha_beta, private, tables

Values = list[list[float | None]]


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every picture of which at least one cell has run."""
    found = []
    if any(cell.name in results.records for cell in results.part("tables")):
        found += [_tables(results, folder / "tables.png"), _betas(results, folder / "betas.png")]
    values = alpha_beta.grid(results)
    base = results.base
    if _some(values):
        note = f"{base.data}, {base.model}, {base.rounds} epochs, seed {base.seed}"
        axes = Axes(base.alphas, base.betas, "α", "β")
        shown = [Table("α-NormEC with SN", values, "highest test accuracy, %")]
        found.append(_png(folder / "alpha.png", lambda path: drawing.heatmaps(path, shown, axes, note)))
    for noise in NOISES:
        grids = {method.name: private.grid(results, noise, method) for method in PRIVATE_METHODS}
        if any(map(_some, grids.values())):
            found.append(_private(results, noise, grids, folder / f"private-{noise}.png"))
    if results.in_full():
        found.append(_lengths(results, folder / "lengths.png"))
    return found


def _private(results: Results, noise: str, grids: dict[str, Values], path: Path) -> Path:
    base = results.base
    note = f"{base.data}, {base.private_model}, {base.short_rounds} epochs, seed {base.seed}; noise read as {noise}: "
    note += private.epsilons(results, noise, long=False)
    axes = Axes(base.private_betas, base.private_lrs, "β", "step size γ")
    shown = [Table(name, values, "highest test accuracy, %") for name, values in grids.items()]
    return _png(path, lambda aside: drawing.heatmaps(aside, shown, axes, note))


def _tables(results: Results, path: Path) -> Path:
    """One panel per method: test accuracy by epoch, with the paper's number as a dotted line of the same colour."""
    with pictures.figure(path, len(TABLE_METHODS), 3.2, drawing.WIDTH) as (sheet, axes):
        for axis, method in zip(axes, TABLE_METHODS, strict=True):
            _panel(results, axis, method.name)
            axis.set_ylim(45, 92)
        axes[0].set_ylabel("test accuracy, %")
        axes[0].plot([], [], color="grey", linestyle=":", linewidth=1, label="the paper's final accuracy")
        handles = axes[0].get_legend_handles_labels()
        sheet.legend(*handles, loc="outside lower center", ncols=len(handles[1]) or 1, fontsize=8)
    return path


def _panel(results: Results, axis: Any, name: str) -> None:
    axis.set_title(name, fontsize=9)
    axis.set_xlabel("epoch")
    for cell in results.part("tables"):
        record = results.of(cell)
        if cell.method.name != name or cell.seed != results.base.seed:
            continue
        colour = drawing.BETA_COLOURS[cell.beta]
        epochs = record["curve"]["epoch"] if record is not None else []
        axis.plot(
            epochs, record["curve"]["test"] if record is not None else [], color=colour, label=f"β = {cell.beta:g}"
        )
        if cell.paper is not None:
            axis.axhline(cell.paper, color=colour, linestyle=":", linewidth=1)


def _betas(results: Results, path: Path) -> Path:
    """Final accuracy by β: ours with its spread over seeds, and the paper's with hollow markers and dotted lines."""
    rows = tables.rows(results)
    with pictures.figure(path, 1, 3.6, 5.2) as (sheet, (axis,)):
        for method, colour, mark in zip(TABLE_METHODS, pictures.COLOURS, "osD^", strict=False):
            own = [row for row in rows if row["method"] == method.name]
            ran = [row for row in own if row["final_test"] is not None]
            axis.errorbar(
                [row["beta"] for row in ran],
                [row["final_test"] for row in ran],
                [row["final_test_spread"] or 0.0 for row in ran],
                color=colour, marker=mark, markersize=4, capsize=2, label=method.name,
            )  # fmt: skip
            paper = {"color": colour, "marker": mark, "markersize": 4, "markerfacecolor": "white"}
            axis.plot([row["beta"] for row in own], [row["paper"] for row in own], linestyle=":", linewidth=1, **paper)
        axis.plot([], [], color="grey", marker="o", markersize=4, markerfacecolor="white", linestyle=":", label="paper")
        axis.set_xscale("log")
        axis.set_xlabel("β (Clip21: its threshold τ)")
        axis.set_ylabel("final test accuracy, %")
        handles, names = axis.get_legend_handles_labels()
        sheet.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3, fontsize=7)
        base = results.base
        sheet.suptitle(f"{base.data}, {base.model}, {base.rounds} epochs", fontsize=7, color="0.35")
    return path


def _lengths(results: Results, path: Path) -> Path:
    """One panel per interpretation of the noise: the runs of full length, and dotted the corresponding short runs."""
    kinds = [(method.name, short) for method in PRIVATE_METHODS for short in (False, True)]
    with pictures.figure(path, len(NOISES), 3.4, 3.8) as (sheet, axes):
        for axis, noise in zip(axes, NOISES, strict=True):
            for cell in results.in_full(noise):
                colour = pictures.COLOURS[kinds.index((cell.method.name, cell.beta == SHORT_BETA))]
                _run(results, axis, cell, color=colour, label=f"{cell.method.name}, β = {cell.beta:g}, γ = {cell.lr:g}")
                _run(results, axis, results.short_run(cell), color=colour, linestyle=":")
            axis.set_title("\n".join(textwrap.wrap(f"{noise}: {private.epsilons(results, noise)}", 62)), fontsize=7)
            axis.set_xlabel("epoch")
        axes[0].set_ylabel("test accuracy, %")
        axes[0].plot([], [], color="grey", linestyle=":", label="the run of half length")
        handles = {text: one for axis in axes for one, text in zip(*axis.get_legend_handles_labels(), strict=True)}
        sheet.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=7)
        sheet.suptitle(f"{results.base.data}, {results.base.private_model}", fontsize=7, color="0.35")
    return path


def _run(results: Results, axis: Any, cell: Cell, **look: Any) -> None:
    record = results.of(cell)
    if record is not None:
        axis.plot(record["curve"]["epoch"], record["curve"]["test"], **look)


def _some(values: Values) -> bool:
    return any(value is not None for line in values for value in line)


def _png(path: Path, make: Callable[[Path], None]) -> Path:
    """Keep only the PNG of a picture that is drawn as PNG and PDF."""
    with tempfile.TemporaryDirectory() as aside:
        make(Path(aside) / path.stem)
        shutil.copyfile(Path(aside) / path.name, path)
    return path
