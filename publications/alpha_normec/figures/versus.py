"""Two methods against each other over β, each with its best step size: the figures and tables that have this form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normec.experiments.grid import Cell
from normec.experiments.sweep import Outcome

from . import arms, drawing
from .arms import Arm
from .figure import Compared, Drawn, guarantee, setting
from .protocol import Protocol
from .published import TABLES, Said
from .results import Results, Row, point


def step_sizes(protocol: Protocol, arm: Arm, beta: float) -> tuple[float, ...]:
    """Those to choose from; only the paper's own where that is the reading and it prints one."""
    printed = TABLES.get(arm.name, {}).get(beta)
    return (printed.lr,) if printed is not None and protocol.choose == "paper" else protocol.lrs


def cells(protocol: Protocol, contestants: Sequence[Arm]) -> list[Cell]:
    """The runs of these methods over β, and over γ where it has to be chosen."""
    return [
        one
        for arm in contestants
        for beta in betas(protocol, arm)
        for one in arms.cells(protocol, arm, [beta], step_sizes(protocol, arm, beta))
    ]


def betas(protocol: Protocol, arm: Arm) -> tuple[float, ...]:
    return protocol.private_betas if arm.private else protocol.betas


def chosen(results: Results, arm: Arm) -> list[tuple[float, Outcome | None]]:
    """The run of each β with the step size that was chosen."""
    protocol = results.protocol
    return [(beta, results.best(arm, beta, step_sizes(protocol, arm, beta))) for beta in betas(protocol, arm)]


def curve_rows(results: Results, outcome: Outcome) -> list[Row]:
    """A run as rows, one a communication round."""
    curve = results.curve(outcome)
    return [
        {**point(outcome), "round": k, "loss": loss, "accuracy": accuracy}
        for k, loss, accuracy in zip(curve.rounds, curve.loss, curve.accuracy, strict=True)
    ]


def draw_curves(results: Results, path: Path, contestants: Sequence[Arm], styles: Mapping[str, Any]) -> Drawn:
    """Loss and accuracy; colours are β, line styles methods."""
    runs = [(arm, beta, run) for arm in contestants for beta, run in chosen(results, arm) if run is not None]
    lines = [drawing.Line(beta, arm.name, results.curve(run)) for arm, beta, run in runs]
    note = setting(results.protocol, contestants[0])
    exact = f"; {guarantee(results, [run for _, _, run in runs])}" if contestants[0].private else ""
    drawing.curves(path, lines, styles, note + exact)
    rows = [row for _, _, run in runs for row in curve_rows(results, run)]
    return Drawn(note, rows, compare(results, contestants))


def draw_table(results: Results, path: Path, contestants: Sequence[Arm]) -> Drawn:
    """Best step size and final accuracy by method and β, the paper's beside them."""
    groups = [[_row(results, arm, beta, run) for beta, run in chosen(results, arm)] for arm in contestants]
    text = [[_line(row, number == 0) for number, row in enumerate(group)] for group in groups]
    rows, note = [row for group in groups for row in group], setting(results.protocol, contestants[0])
    best = max(range(len(rows)), key=lambda number: rows[number]["final_accuracy"] or 0.0)
    drawing.table(path, ("method", "β", "γ", "accuracy", "paper: γ", "accuracy"), text, best, note)
    return Drawn(note, rows, compare(results, contestants))


def compare(results: Results, contestants: Sequence[Arm]) -> list[Compared]:
    """Final accuracies beside the paper's, then the first method's lead over the second at each β."""
    ours = {(arm.name, beta): results.final(run) for arm in contestants for beta, run in chosen(results, arm)}
    known = {place: TABLES[place[0]][place[1]] for place in ours if place[1] in TABLES.get(place[0], {})}
    found = [Compared(f"{name}, β = {b:g}", Said.exactly(known[name, b].accuracy), ours[name, b]) for name, b in known]
    first, second = (arm.name for arm in contestants[:2])
    for beta in sorted({beta for _, beta in known}):
        a, b = (first, beta), (second, beta)
        if a in known and b in known:
            lead = _minus(ours[a], ours[b])
            said = Said.exactly(round(known[a].accuracy - known[b].accuracy, 2))
            found.append(Compared(f"{first} − {second}, β = {beta:g}", said, lead))
    return found


def _row(results: Results, arm: Arm, beta: float, run: Outcome | None) -> Row:
    printed = TABLES[arm.name].get(beta)
    return {
        "method": arm.name,
        "beta": beta,
        "lr": run.cell.config.lr if run is not None else None,
        "final_accuracy": results.final(run),
        "test_accuracy": results.final(run, "accuracy"),
        "held_out_accuracy": results.final(run, "validation_accuracy"),
        "paper_lr": printed.lr if printed is not None else None,
        "paper_accuracy": printed.accuracy if printed is not None else None,
        "digest": run.cell.config.digest() if run is not None else None,
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
