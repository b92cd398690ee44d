"""The page of part 3: the private figures with two interpretations of the noise, and their exact ε."""

from __future__ import annotations

import math

from normec.experiments.export import Row, to_markdown

from ..methods import DP_NORMEC, DP_NORMEC_SN, PRIVATE_METHODS, PaperMethod
from ..plan import NOISES, PER_COORDINATE, Cell
from ..published import PEAK, PEAK_SN, SPREAD_BETAS
from ..results import NOT_RUN, Results, text

SAYS = {
    "total-norm": "the noise's norm, √E‖z‖²",
    "total-variance": "a variance, E‖z‖²",
    PER_COORDINATE: "each coordinate's standard deviation",
}


def rows(results: Results) -> list[Row]:
    """One row per cell, with the cells of full length that were run."""
    cells = [
        cell
        for cell in results.cells
        if cell.part == "private" and (not cell.full_length or cell.name in results.records)
    ]
    return [_row(results, cell) for cell in cells]


def _row(results: Results, cell: Cell) -> Row:
    record = results.of(cell)
    privacy = (record["privacy"] or {}) if record is not None else {}
    return {
        "noise": cell.reading,
        "method": cell.method.name,
        "beta": cell.beta,
        "lr": cell.lr,
        "epochs": cell.config.epochs,
        "status": record["status"] if record is not None else NOT_RUN,
        "best_test": results.highest(cell),
        "best_held_out": results.highest(cell, "held_out"),
        "final_test": record["final"]["test"] if record is not None else None,
        "sigma": cell.config.sigma,
        "exact_epsilon": privacy.get("epsilon"),
        "delta": cell.config.delta,
    }


def grid(results: Results, noise: str, method: PaperMethod) -> list[list[float | None]]:
    """The highest accuracy over β (down) × γ (across)."""
    return [
        [
            results.highest(cells[0]) if (cells := results.find("private", method, beta, lr, noise)) else None
            for lr in results.base.private_lrs
        ]
        for beta in results.base.private_betas
    ]


def peak(results: Results, noise: str, method: PaperMethod) -> float | None:
    """The highest accuracy of a method, once all its cells have run."""
    values = [value for line in grid(results, noise, method) for value in line]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def spread(results: Results, noise: str, method: PaperMethod) -> float | None:
    """The largest difference over γ at one of the β that the paper mentions."""
    found = []
    for beta, line in zip(results.base.private_betas, grid(results, noise, method), strict=True):
        if beta in SPREAD_BETAS:
            known = [value for value in line if value is not None]
            if len(known) < len(line):
                return None
            found.append(max(known) - min(known))
    return max(found) if found else None


def epsilons(results: Results, noise: str, long: bool = True) -> str:
    """The exact ε of the short runs and, with `long`, of the runs of full length."""
    found: dict[int, set[float]] = {}
    for row in rows(results):
        shown = long or row["epochs"] == results.base.short_rounds
        if row["noise"] == noise and row["exact_epsilon"] is not None and shown:
            found.setdefault(int(row["epochs"]), set()).add(row["exact_epsilon"])
    if not found:
        return "exact ε: not run"
    texts = [f"{max(values):.4g} after {epochs} epochs" for epochs, values in sorted(found.items())]
    return (
        f"exact ε at δ = {results.base.delta:g}, for a worker against a server that sees every message: "
        + ", ".join(texts)
    )


def _meaning(results: Results, noise: str) -> str:
    """The reading of the formula's value s = √(K ln(1/δ))/ε, and the exact ε of its runs."""
    base = results.base
    size = math.sqrt(base.rounds * math.log(1 / base.delta)) / base.formula_epsilon
    return f"The formula's {size:.3g} is {SAYS[noise]}; {epsilons(results, noise)}."


def lines(results: Results) -> list[str]:
    base = results.base
    found = [
        "# The private figures",
        "",
        f"{base.data}, {base.private_model}, {base.clients} workers, {base.short_rounds} epochs. The best cell of each "
        f"method, and the best one with SN at β = 1, are also run for {base.rounds}. With noise the model has "
        "GroupNorm: BatchNorm's running statistics are functions of the data that no noise covers, so such a run has "
        "no ε and is refused. Accuracies are the highest test accuracies along a run, in percent; for Clip21 β is the "
        "threshold τ.",
        "",
        f"**The noise comes from the paper's formula for ε = {base.formula_epsilon:g}; no run here has this ε.** Every "
        "table states the exact "
        "ε of its runs. They protect nobody; they are here to be compared with the paper's figures.",
        "",
    ]
    for noise in NOISES:
        found += [f"## Noise read as {noise}", "", _meaning(results, noise), ""]
        for method in PRIVATE_METHODS:
            values = grid(results, noise, method)
            shown = [
                [f"{beta:g}", *(text(v, ".2f") for v in line)]
                for beta, line in zip(base.private_betas, values, strict=True)
            ]
            found += [
                f"{method.name}:",
                "",
                *to_markdown(("β \\ γ", *(f"{lr:g}" for lr in results.base.private_lrs)), shown),
                "",
            ]
        shown_by = [cell for cell in results.part("private") if cell.reading == noise]
        found += [*_peaks(results, noise), ""]
        found += results.picture(f"private-{noise}.png", f"Heat maps, noise read as {noise}", shown_by)
    found += [
        f"## Noise read as {PER_COORDINATE}",
        "",
        _meaning(results, PER_COORDINATE),
        "",
    ]
    own = [row for row in rows(results) if row["noise"] == PER_COORDINATE]
    shown = [[row["method"], f"{row['beta']:g}", f"{row['lr']:g}", _ended(row)] for row in own]
    found += [*to_markdown(("method", "β", "γ", "highest accuracy"), shown), ""]
    found += ["## Runs of full length", "", *_long(results), ""]
    if results.in_full():
        found += ["![Runs of half and of full length](lengths.png)", ""]
        found += ["A longer run is another configuration with independent noise: no noise is used twice.", ""]
    return [*found, "All numbers: [private.csv](private.csv)."]


def _peaks(results: Results, noise: str) -> list[str]:
    paper = {DP_NORMEC.name: PEAK.text, DP_NORMEC_SN.name: PEAK_SN.text}
    shown = [
        [
            method.name,
            paper.get(method.name, "–"),
            text(peak(results, noise, method), ".2f"),
            text(spread(results, noise, method), ".2f"),
        ]
        for method in PRIVATE_METHODS
    ]
    spread_column = f"largest spread over γ, β ≤ {max(SPREAD_BETAS):g}"
    return to_markdown(("method", "paper's highest", "ours", spread_column), shown)


def _long(results: Results) -> list[str]:
    if not results.in_full():
        return ["Not run: the best cells are chosen on the held-out images once all cells of their kind have run."]
    shown = []
    for cell in results.in_full():
        values = (results.highest(results.short_run(cell)), results.first_half(cell), results.highest(cell))
        shown.append(
            [cell.reading, cell.method.name, f"{cell.beta:g}", f"{cell.lr:g}", *(text(one, ".2f") for one in values)]
        )
    base = results.base
    lengths = (f"{base.short_rounds} epochs", f"first {base.short_rounds} of {base.rounds}", f"{base.rounds} epochs")
    header = ("noise", "method", "β", "γ", *lengths)
    return to_markdown(header, shown)


def _ended(row: Row) -> str:
    if row["best_test"] is None:
        return str(row["status"])
    return f"{row['best_test']:.2f}" + (", then diverged" if row["status"] == "diverged" else "")
