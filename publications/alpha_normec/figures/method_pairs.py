"""Two methods compared over β, each with its best step size: fig-ef, tab-ef, fig-sn, tab-sn, fig-clip, tab-clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normec.experiments.export import Row

from .. import drawing
from ..methods import CLIP21, DPSGD, NORMEC, NORMEC_SN, PaperMethod
from ..plan import Cell, cell_at, private_cell, step_sizes
from ..protocol import Protocol
from ..published import PaperNumber, printed
from ..results import Results
from .figure import Comparison, Drawn, Figure, guarantee, point, setting


def candidates(protocol: Protocol, method: PaperMethod, beta: float, short: bool = False) -> list[Cell]:
    """The cells of a method and β, one per step size to choose from."""
    lrs = step_sizes(protocol, method, beta)
    if method.private:
        return [private_cell(protocol, method, beta, lr, full_length=not short) for lr in lrs]
    return [cell_at(protocol, method, beta, lr) for lr in lrs]


def cells(protocol: Protocol, methods: Sequence[PaperMethod]) -> list[Cell]:
    """The cells of several methods over β and the step sizes to choose from."""
    return [one for method in methods for beta in betas(protocol, method) for one in candidates(protocol, method, beta)]


def betas(protocol: Protocol, method: PaperMethod) -> tuple[float, ...]:
    return protocol.private_betas if method.private else protocol.betas


def chosen(results: Results, method: PaperMethod, short: bool = False) -> list[tuple[float, Cell | None]]:
    """For each β, the cell with the chosen step size."""
    base = results.base
    return [(beta, results.best(candidates(base, method, beta, short))) for beta in betas(base, method)]


def curve_rows(results: Results, cell: Cell) -> list[Row]:
    """A run as rows, one per communication round."""
    curve = results.curve(cell)
    return [
        {**point(results, cell), "round": k, "loss": loss, "accuracy": accuracy}
        for k, loss, accuracy in zip(curve.rounds, curve.loss, curve.accuracy, strict=True)
    ]


def draw_curves(results: Results, path: Path, methods: Sequence[PaperMethod], styles: Mapping[str, Any]) -> Drawn:
    """Draw loss and accuracy; colours show β and line styles show methods."""
    runs = [(method, beta, run) for method in methods for beta, run in chosen(results, method) if run is not None]
    lines = [drawing.Line(beta, method.name, results.curve(run)) for method, beta, run in runs]
    note = setting(results.base, methods[0])
    exact = f"; {guarantee(results, [run for _, _, run in runs])}" if methods[0].private else ""
    drawing.curves(path, lines, styles, note + exact)
    rows = [row for _, _, run in runs for row in curve_rows(results, run)]
    return Drawn(note, rows, compare(results, methods))


def draw_table(results: Results, path: Path, methods: Sequence[PaperMethod]) -> Drawn:
    """Draw the table of best step sizes and final accuracies, with the paper's."""
    groups = [[_row(results, method, beta, run) for beta, run in chosen(results, method)] for method in methods]
    text = [[_line(row, number == 0) for number, row in enumerate(group)] for group in groups]
    rows, note = [row for group in groups for row in group], setting(results.base, methods[0])
    best = max(range(len(rows)), key=lambda number: rows[number]["final_accuracy"] or 0.0)
    drawing.table(path, ("method", "β", "γ", "accuracy", "paper: γ", "accuracy"), text, best, note)
    return Drawn(note, rows, compare(results, methods))


def compare(results: Results, methods: Sequence[PaperMethod]) -> list[Comparison]:
    """Final accuracies compared with the paper's, then the lead of the first method over the second for each β."""
    column = results.base.column
    ours = {(method, beta): results.final(run, column) for method in methods for beta, run in chosen(results, method)}
    paper = {(method, beta): entry.accuracy for method, beta in ours if (entry := printed(method, beta)) is not None}
    found = [
        Comparison(f"{method.name}, β = {beta:g}", PaperNumber.exactly(value), ours[method, beta])
        for (method, beta), value in paper.items()
    ]
    first, second = methods[:2]
    for beta in sorted({beta for _, beta in paper}):
        a, b = (first, beta), (second, beta)
        if a in paper and b in paper:
            said = PaperNumber.exactly(round(paper[a] - paper[b], 2))
            found.append(Comparison(f"{first.name} − {second.name}, β = {beta:g}", said, _minus(ours[a], ours[b])))
    return found


def _row(results: Results, method: PaperMethod, beta: float, run: Cell | None) -> Row:
    entry = printed(method, beta)
    return {
        "method": method.name,
        "beta": beta,
        "lr": run.lr if run is not None else None,
        "final_accuracy": results.final(run, results.base.column),
        "test_accuracy": results.final(run, "test"),
        "held_out_accuracy": results.final(run, "held_out"),
        "paper_lr": entry.lr if entry is not None else None,
        "paper_accuracy": entry.accuracy if entry is not None else None,
        "digest": run.config.digest() if run is not None else None,
    }


def _line(row: Row, first: bool) -> list[str]:
    def number(key: str, form: str) -> str:
        return "–" if row[key] is None else format(row[key], form)

    ours = f"{row['final_accuracy']:.2f} %" if row["final_accuracy"] is not None else "diverged"
    return [
        row["method"] if first else "",
        f"{row['beta']:g}",
        number("lr", "g"),
        ours,
        number("paper_lr", "g"),
        "–" if row["paper_accuracy"] is None else f"{row['paper_accuracy']:.2f} %",
    ]


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _pair(name: str, first: PaperMethod, second: PaperMethod, shows: str, styles: tuple[str, str]) -> list[Figure]:
    """The figure and the table of two methods, with the line styles of the paper."""
    methods = (first, second)

    def pair_cells(protocol: Protocol) -> list[Cell]:
        return cells(protocol, methods)

    def curves(results: Results, path: Path) -> Drawn:
        return draw_curves(results, path, methods, {first.name: styles[0], second.name: styles[1]})

    def table(results: Results, path: Path) -> Drawn:
        return draw_table(results, path, methods)

    return [
        Figure(f"fig-{name}", f"{shows}, no noise", pair_cells, curves),
        Figure(f"tab-{name}", f"Final accuracies: {shows}, no noise", pair_cells, table),
    ]


# Figure 3 and three appendices of the paper.
EF = _pair("ef", NORMEC, DPSGD, "α-NormEC without SN and DP-SGD with smoothed normalisation", ("--", "-"))
SN = _pair("sn", NORMEC_SN, NORMEC, "α-NormEC with and without SN", ("-", "--"))
CLIP = _pair("clip", CLIP21, NORMEC, "Clip21 and α-NormEC without SN", ("-", "--"))
