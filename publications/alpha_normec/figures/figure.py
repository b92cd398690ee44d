"""A figure or table of the paper: the cells that it needs, how it is drawn, and the files that are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normec.experiments.export import Row, to_csv
from normec.system.files import write_atomic

from ..methods import PaperMethod
from ..plan import Cell
from ..protocol import Protocol, extent
from ..published import PaperNumber
from ..records import FOLDER
from ..results import Results


@dataclass(frozen=True)
class Comparison:
    """A number of the paper and ours, which is None if no run has one."""

    what: str
    paper: PaperNumber
    ours: float | None

    def row(self) -> Row:
        number = self.paper.low if self.paper.low == self.paper.high else self.paper.text
        difference = None if self.ours is None else self.paper.difference(self.ours)
        return {"what": self.what, "paper": number, "ours": self.ours, "difference": difference}

    def line(self) -> tuple[str, str, str, str]:
        """The row as text."""
        ours = "–" if self.ours is None else f"{self.ours:.2f}"
        difference = "–" if self.ours is None else f"{self.paper.difference(self.ours):+.2f}"
        return self.what, self.paper.text, ours, difference


@dataclass(frozen=True)
class Drawn:
    """The content of a figure: the setting, one row per number in the picture, and comparisons with the paper."""

    setting: str
    rows: list[Row]
    compared: list[Comparison] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """A figure; `cells` lists the cells that it needs, and `draw` makes the pictures at a path without suffix."""

    name: str
    shows: str
    cells: Callable[[Protocol], list[Cell]]
    draw: Callable[[Results, Path], Drawn]


@dataclass(frozen=True)
class Made:
    """A figure on disk."""

    figure: Figure
    files: list[Path]
    compared: list[Comparison]


def setting(protocol: Protocol, method: PaperMethod, short: bool = False) -> str:
    """The setting of the runs in one line."""
    model = protocol.private_model if method.private else protocol.model
    rounds = protocol.short_rounds if short else protocol.rounds
    each = f"{rounds} rounds ({extent(protocol).steps} messages each)"
    return f"{protocol.data}, {model}, {protocol.clients} clients, {each}, seed {protocol.seed}"


def guarantee(results: Results, cells: Iterable[Cell]) -> str:
    """The interpretation of the noise, and the exact ε of the runs."""
    protocol, epsilons = results.base, results.epsilons(cells)
    exact = "no run finished"
    if epsilons:
        sign = "=" if epsilons[-1] - epsilons[0] < 1e-6 * epsilons[-1] else "up to"
        exact = f"exact ε {sign} {epsilons[-1]:.4g} at δ = {protocol.delta:g}"
    whom = f"for a client ({protocol.relation}, {protocol.trust})"
    return f"noise read as {protocol.noise}, K counting {protocol.noise_rounds}: {exact} {whom}"


def make(figure: Figure, results: Results, folder: Path) -> Made:
    """Draw a figure and write its numbers: NAME.png, .pdf, .json, .csv, and NAME-compared.md and .csv."""
    path, protocol = folder / figure.name, results.base
    cells = figure.cells(protocol)
    drawn = figure.draw(results, path)
    compared = [one.row() for one in drawn.compared]
    content = {
        "figure": figure.name,
        "shows": figure.shows,
        "setting": drawn.setting,
        "protocol": protocol.model_dump(),
        "messages_per_round": extent(protocol).steps,
        "rows": drawn.rows,
        "compared": compared,
        "runs": [_run(results, cell) for cell in cells],
    }
    write_atomic(path.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_atomic(path.with_suffix(".csv"), to_csv(drawn.rows))
    files = [path.with_suffix(suffix) for suffix in (".png", ".pdf", ".json", ".csv")]
    if compared:
        tables = [folder / f"{figure.name}-compared{suffix}" for suffix in (".md", ".csv")]
        write_atomic(tables[0], _markdown(figure, results, drawn))
        write_atomic(tables[1], to_csv(compared))
        files += tables
    return Made(figure, files, drawn.compared)


def index(figures: Sequence[Figure], folder: Path) -> Path:
    """Write index.md, which shows all figures in the folder."""
    lines = ["# The paper's figures, reproduced", ""]
    for figure in figures:
        path = folder / f"{figure.name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        table = f"{figure.name}-compared.md"
        compared = f", [compared with the paper]({table})" if (folder / table).exists() else ""
        lines += [
            f"## {figure.name}",
            f"{figure.shows}. {content['setting']}.",
            "",
            f"[PDF]({figure.name}.pdf), numbers as [JSON]({figure.name}.json) and [CSV]({figure.name}.csv){compared}",
            "",
            f"![{figure.name}]({figure.name}.png)",
            "",
        ]
    write_atomic(folder / "index.md", "\n".join(lines))
    return folder / "index.md"


def point(results: Results, cell: Cell | None) -> Row:
    """The settings of a cell in the grids, and its name and digest; all None without a cell."""
    if cell is None:
        return dict.fromkeys(("method", "alpha", "beta", "lr", "digest"))
    alpha = (results.base.alpha if cell.alpha is None else cell.alpha) if cell.method.smoothed else None
    settings = {"method": cell.method.name, "alpha": alpha, "beta": cell.beta, "lr": cell.lr}
    return {**settings, "digest": cell.config.digest()}


def _run(results: Results, cell: Cell) -> Row:
    record = results.records[cell.name]
    return {
        "name": cell.name,
        **point(results, cell),
        "seed": cell.seed,
        "status": record["status"],
        "error": record["error"],
        "sigma": cell.config.sigma,
        "epsilon": record["privacy"]["epsilon"] if record["privacy"] is not None else None,
        "record": (FOLDER / f"{cell.name}.json").as_posix(),
    }


def _markdown(figure: Figure, results: Results, drawn: Drawn) -> str:
    protocol, cells = results.base, figure.cells(results.base)
    lines = [f"# {figure.name}: paper / ours / difference", "", f"{figure.shows}. Accuracies in percent.", ""]
    lines += [f"Ours: {drawn.setting}.", ""]
    if protocol.scale != "paper":
        lines += [
            f"At scale {protocol.scale} the order of the methods can be compared with the paper, not the numbers.",
            "",
        ]
    if any(cell.method.private for cell in cells):
        lines += [f"Privacy: {guarantee(results, cells)}.", ""]
    lines += ["| | paper | ours | difference |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(one.line()) + " |" for one in drawn.compared]
    return "\n".join(lines) + "\n"
