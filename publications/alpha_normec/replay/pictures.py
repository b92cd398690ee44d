"""The pictures of the replay's pages: curves beside the paper's numbers, heat maps. Made where cells have run."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normec.report import pictures

from ..figures import drawing
from ..figures.drawing import Axes, Table
from ..figures.published import SHORT_BETA
from . import page_alpha, page_private, page_tables
from .facts import Facts
from .page_tables import METHODS
from .plan import NOISES, PRIVATE_ARMS, PRIVATE_LRS, Planned

Values = list[list[float | None]]


def draw(facts: Facts, folder: Path) -> list[Path]:
    """Every picture whose cells have run, at least one of them."""
    found = []
    if any(cell.name in facts.records for cell in facts.part("tables")):
        found += [_tables(facts, folder / "tables.png"), _betas(facts, folder / "betas.png")]
    values = page_alpha.grid(facts)
    base = facts.base
    if _some(values):
        note = f"{base.data}, {base.model}, {base.rounds} epochs, seed {base.seed}"
        axes = Axes(base.alphas, base.betas, "α", "β")
        tables = [Table("α-NormEC with SN", values, "highest test accuracy, %")]
        found.append(_png(folder / "alpha.png", lambda path: drawing.heatmaps(path, tables, axes, note)))
    for noise in NOISES:
        grids = {arm.name: page_private.grid(facts, noise, arm) for arm in PRIVATE_ARMS}
        if any(map(_some, grids.values())):
            found.append(_private(facts, noise, grids, folder / f"private-{noise}.png"))
    if facts.in_full():
        found.append(_lengths(facts, folder / "lengths.png"))
    return found


def _private(facts: Facts, noise: str, grids: dict[str, Values], path: Path) -> Path:
    base = facts.base
    note = f"{base.data}, {base.private_model}, {base.short_rounds} epochs, seed {base.seed}; noise read as {noise}: "
    note += page_private.epsilons(facts, noise, long=False)
    axes = Axes(base.private_betas, PRIVATE_LRS, "β", "step size γ")
    tables = [Table(name, values, "highest test accuracy, %") for name, values in grids.items()]
    return _png(path, lambda aside: drawing.heatmaps(aside, tables, axes, note))


def _tables(facts: Facts, path: Path) -> Path:
    """A panel a method: test accuracy by epoch, the paper's number as a dotted line of the same colour."""
    with pictures.figure(path, len(METHODS), 3.2, drawing.WIDTH) as (sheet, axes):
        for axis, arm in zip(axes, METHODS, strict=True):
            _panel(facts, axis, arm.name)
            axis.set_ylim(45, 92)
        axes[0].set_ylabel("test accuracy, %")
        axes[0].plot([], [], color="grey", linestyle=":", linewidth=1, label="the paper's final accuracy")
        handles = axes[0].get_legend_handles_labels()
        sheet.legend(*handles, loc="outside lower center", ncols=len(handles[1]) or 1, fontsize=8)
    return path


def _panel(facts: Facts, axis: Any, method: str) -> None:
    axis.set_title(method, fontsize=9)
    axis.set_xlabel("epoch")
    for cell in facts.part("tables"):
        record = facts.of(cell)
        if cell.arm.name != method or cell.seed != facts.base.seed:
            continue
        colour = drawing.BETA_COLOURS[cell.beta]
        epochs = record["curve"]["epoch"] if record is not None else []
        axis.plot(
            epochs, record["curve"]["test"] if record is not None else [], color=colour, label=f"β = {cell.beta:g}"
        )
        if cell.paper is not None:
            axis.axhline(cell.paper, color=colour, linestyle=":", linewidth=1)


def _betas(facts: Facts, path: Path) -> Path:
    """Final accuracy by β: ours, with its spread over seeds, and the paper's as hollow marks on dotted lines."""
    rows = page_tables.rows(facts)
    with pictures.figure(path, 1, 3.6, 5.2) as (sheet, (axis,)):
        for arm, colour, mark in zip(METHODS, pictures.COLOURS, "osD^", strict=False):
            own = [row for row in rows if row["method"] == arm.name]
            ran = [row for row in own if row["final_test"] is not None]
            axis.errorbar(
                [row["beta"] for row in ran],
                [row["final_test"] for row in ran],
                [row["final_test_spread"] or 0.0 for row in ran],
                color=colour, marker=mark, markersize=4, capsize=2, label=arm.name,
            )  # fmt: skip
            paper = {"color": colour, "marker": mark, "markersize": 4, "markerfacecolor": "white"}
            axis.plot([row["beta"] for row in own], [row["paper"] for row in own], linestyle=":", linewidth=1, **paper)
        axis.plot([], [], color="grey", marker="o", markersize=4, markerfacecolor="white", linestyle=":", label="paper")
        axis.set_xscale("log")
        axis.set_xlabel("β (Clip21: its threshold τ)")
        axis.set_ylabel("final test accuracy, %")
        handles, names = axis.get_legend_handles_labels()
        sheet.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3, fontsize=7)
        base = facts.base
        sheet.suptitle(f"{base.data}, {base.model}, {base.rounds} epochs", fontsize=7, color="0.35")
    return path


def _lengths(facts: Facts, path: Path) -> Path:
    """A panel a reading of the noise: the runs in full, and dotted those of half length that they were chosen by."""
    kinds = [(arm.name, short) for arm in PRIVATE_ARMS for short in (False, True)]
    with pictures.figure(path, len(NOISES), 3.4, 3.8) as (sheet, axes):
        for axis, noise in zip(axes, NOISES, strict=True):
            for cell in facts.in_full(noise):
                colour = pictures.COLOURS[kinds.index((cell.arm.name, cell.beta == SHORT_BETA))]
                _run(facts, axis, cell, color=colour, label=f"{cell.arm.name}, β = {cell.beta:g}, γ = {cell.lr:g}")
                _run(facts, axis, facts.short_run(cell), color=colour, linestyle=":")
            axis.set_title("\n".join(textwrap.wrap(f"{noise}: {page_private.epsilons(facts, noise)}", 62)), fontsize=7)
            axis.set_xlabel("epoch")
        axes[0].set_ylabel("test accuracy, %")
        axes[0].plot([], [], color="grey", linestyle=":", label="the run of half length")
        handles = {text: one for axis in axes for one, text in zip(*axis.get_legend_handles_labels(), strict=True)}
        sheet.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=7)
        sheet.suptitle(f"{facts.base.data}, {facts.base.private_model}", fontsize=7, color="0.35")
    return path


def _run(facts: Facts, axis: Any, cell: Planned, **look: Any) -> None:
    record = facts.of(cell)
    if record is not None:
        axis.plot(record["curve"]["epoch"], record["curve"]["test"], **look)


def _some(values: Values) -> bool:
    return any(value is not None for line in values for value in line)


def _png(path: Path, make: Callable[[Path], None]) -> Path:
    """The PNG alone of a picture that is drawn as PNG and PDF."""
    with tempfile.TemporaryDirectory() as aside:
        make(Path(aside) / path.stem)
        shutil.copyfile(Path(aside) / path.name, path)
    return path
