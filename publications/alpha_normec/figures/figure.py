"""A figure or table of the paper: which runs it needs, how it is drawn, and the files that come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normec.experiments.grid import Cell
from normec.experiments.sweep import Outcome
from normec.experiments.tables import to_csv
from normec.system.files import write_atomic

from .arms import Arm
from .protocol import Protocol, extent
from .published import Said
from .results import Results, Row, point


@dataclass(frozen=True)
class Compared:
    """A number of the paper beside ours; None where our run has none."""

    what: str
    said: Said
    ours: float | None

    def row(self) -> Row:
        paper = self.said.low if self.said.low == self.said.high else self.said.text
        difference = None if self.ours is None else self.said.difference(self.ours)
        return {"what": self.what, "paper": paper, "ours": self.ours, "difference": difference}

    def line(self) -> tuple[str, str, str, str]:
        """As people read it."""
        ours = "–" if self.ours is None else f"{self.ours:.2f}"
        difference = "–" if self.ours is None else f"{self.said.difference(self.ours):+.2f}"
        return self.what, self.said.text, ours, difference


@dataclass(frozen=True)
class Drawn:
    """What a figure shows: what was trained, every number in the picture as a row, and the paper's beside ours."""

    setting: str
    rows: list[Row]
    compared: list[Compared] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """`cells` says which runs it needs; `draw` makes the pictures at a path without suffix."""

    name: str
    shows: str
    cells: Callable[[Protocol], list[Cell]]
    draw: Callable[[Results, Path], Drawn]


@dataclass(frozen=True)
class Made:
    """A figure on disk."""

    figure: Figure
    files: list[Path]
    compared: list[Compared]


def setting(protocol: Protocol, arm: Arm) -> str:
    """What was trained, in a line."""
    model = protocol.private_model if arm.private else protocol.model
    rounds = protocol.short_rounds if arm.short else protocol.rounds
    each = f"{rounds} rounds ({extent(protocol).steps} messages each)"
    return f"{protocol.data}, {model}, {protocol.clients} clients, {each}, seed {protocol.seed}"


def guarantee(results: Results, outcomes: Iterable[Outcome]) -> str:
    """The noise's reading, and the exact ε of the runs: what they have, whatever the formula was asked for."""
    protocol, epsilons = results.protocol, results.epsilons(outcomes)
    exact = "no run came to its end"
    if epsilons:
        sign = "=" if epsilons[-1] - epsilons[0] < 1e-6 * epsilons[-1] else "up to"
        exact = f"exact ε {sign} {epsilons[-1]:.4g} at δ = {protocol.delta:g}"
    whom = f"for a client ({protocol.relation}, {protocol.trust})"
    return f"noise read as {protocol.noise}, K counting {protocol.noise_rounds}: {exact} {whom}"


def make(figure: Figure, results: Results, folder: Path) -> Made:
    """Draw a figure and write its numbers: NAME.png, .pdf, .json, .csv, and NAME-compared.md and .csv."""
    path, protocol = folder / figure.name, results.protocol
    outcomes = results.of(figure.cells(protocol))
    drawn = figure.draw(results, path)
    compared = [one.row() for one in drawn.compared]
    told = {
        "figure": figure.name,
        "shows": figure.shows,
        "setting": drawn.setting,
        "protocol": protocol.model_dump(),
        "messages_a_round": extent(protocol).steps,
        "rows": drawn.rows,
        "compared": compared,
        "runs": [_run(outcome, folder) for outcome in outcomes],
    }
    write_atomic(path.with_suffix(".json"), json.dumps(told, indent=1) + "\n")
    write_atomic(path.with_suffix(".csv"), to_csv(drawn.rows))
    files = [path.with_suffix(suffix) for suffix in (".png", ".pdf", ".json", ".csv")]
    if compared:
        beside = [folder / f"{figure.name}-compared{suffix}" for suffix in (".md", ".csv")]
        write_atomic(beside[0], _markdown(figure, results, outcomes, drawn))
        write_atomic(beside[1], to_csv(compared))
        files += beside
    return Made(figure, files, drawn.compared)


def index(figures: Sequence[Figure], folder: Path) -> Path:
    """index.md: what the folder holds so far."""
    lines = ["# The paper's figures, as they come out here", ""]
    for figure in figures:
        path = folder / f"{figure.name}.json"
        if not path.exists():
            continue
        told = json.loads(path.read_text(encoding="utf-8"))
        beside = f"{figure.name}-compared.md"
        compared = f", [beside the paper]({beside})" if (folder / beside).exists() else ", the paper prints no numbers"
        lines += [
            f"## {figure.name}",
            f"{figure.shows}. {told['setting']}.",
            "",
            f"[PDF]({figure.name}.pdf), numbers as [JSON]({figure.name}.json) and [CSV]({figure.name}.csv){compared}",
            "",
            f"![{figure.name}]({figure.name}.png)",
            "",
        ]
    write_atomic(folder / "index.md", "\n".join(lines))
    return folder / "index.md"


def _run(outcome: Outcome, folder: Path) -> Row:
    privacy: dict[str, Any] = outcome.summary.get("privacy") or {}
    return {
        **point(outcome),
        "seed": outcome.cell.config.seed,
        "status": outcome.status,
        "error": outcome.error,
        "sigma": outcome.cell.config.sigma,
        "epsilon": privacy.get("epsilon"),
        "folder": outcome.folder.relative_to(folder.resolve()).as_posix(),
    }


def _markdown(figure: Figure, results: Results, outcomes: Sequence[Outcome], drawn: Drawn) -> str:
    protocol = results.protocol
    lines = [f"# {figure.name}: paper / ours / difference", "", f"{figure.shows}. Accuracies in percent.", ""]
    lines += [f"Ours: {drawn.setting}.", ""]
    if protocol.scale != "paper":
        lines += [
            f"At scale {protocol.scale} the order of methods can be compared with the paper, not the numbers.",
            "",
        ]
    if any(outcome.cell.config.private for outcome in outcomes):
        lines += [f"Privacy: {guarantee(results, outcomes)}.", ""]
    lines += ["| | paper | ours | difference |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(one.line()) + " |" for one in drawn.compared]
    return "\n".join(lines) + "\n"
