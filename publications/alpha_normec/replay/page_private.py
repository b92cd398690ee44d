"""Part 3 on a page: the private figures under the readings of the noise that train, with the ε that they have."""

from __future__ import annotations

from typing import Any

from normec.experiments.tables import to_markdown

from ..figures import arms
from ..figures.arms import Arm
from ..figures.published import PEAK, PEAK_SN, SPREAD_BETAS
from .facts import NOT_RUN, Facts, text
from .plan import HOPELESS, NOISES, PRIVATE_ARMS, PRIVATE_LRS, Planned

Row = dict[str, Any]
SAYS = {
    "total-norm": "The formula's 7.35 is the noise's norm, √E‖z‖²",
    "total-variance": "The formula's 7.35 is a variance, E‖z‖²",
    HOPELESS: "The formula's 7.35 is each coordinate's standard deviation",
}


def rows(facts: Facts) -> list[Row]:
    """One a cell, the long ones that were chosen included."""
    cells = [cell for cell in facts.cells if cell.part == "private" and (not cell.chosen or cell.name in facts.records)]
    return [_row(facts, cell) for cell in cells]


def _row(facts: Facts, cell: Planned) -> Row:
    record = facts.of(cell)
    privacy = (record["privacy"] or {}) if record is not None else {}
    return {
        "noise": cell.reading,
        "method": cell.arm.name,
        "beta": cell.beta,
        "lr": cell.lr,
        "epochs": cell.config.epochs,
        "status": record["status"] if record is not None else NOT_RUN,
        "best_test": facts.highest(cell),
        "best_held_out": facts.highest(cell, "held_out"),
        "final_test": record["final"]["test"] if record is not None else None,
        "sigma": cell.config.sigma,
        "exact_epsilon": privacy.get("epsilon"),
        "delta": cell.config.delta,
    }


def grid(facts: Facts, noise: str, arm: Arm) -> list[list[float | None]]:
    """The highest accuracy over β (down) × γ (across)."""
    return [
        [
            facts.highest(cells[0]) if (cells := facts.find("private", arm, beta, lr, noise)) else None
            for lr in PRIVATE_LRS
        ]
        for beta in facts.base.private_betas
    ]


def peak(facts: Facts, noise: str, arm: Arm) -> float | None:
    """The highest accuracy of a method under a reading, once all its cells have run."""
    values = [value for line in grid(facts, noise, arm) for value in line]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def spread(facts: Facts, noise: str, arm: Arm) -> float | None:
    """The largest difference over γ at one of the β of which the paper speaks."""
    found = []
    for beta, line in zip(facts.base.private_betas, grid(facts, noise, arm), strict=True):
        if beta in SPREAD_BETAS:
            known = [value for value in line if value is not None]
            if len(known) < len(line):
                return None
            found.append(max(known) - min(known))
    return max(found) if found else None


def epsilons(facts: Facts, noise: str, long: bool = True) -> str:
    """The exact ε of a reading's runs, those of half length and, with `long`, those in full."""
    found: dict[int, set[float]] = {}
    for row in rows(facts):
        shown = long or row["epochs"] == facts.base.short_rounds
        if row["noise"] == noise and row["exact_epsilon"] is not None and shown:
            found.setdefault(int(row["epochs"]), set()).add(row["exact_epsilon"])
    if not found:
        return "exact ε: not run"
    texts = [f"{max(values):.4g} after {epochs} epochs" for epochs, values in sorted(found.items())]
    return f"exact ε at δ = {facts.base.delta:g}, for a worker against a server that sees every message: " + ", ".join(
        texts
    )


def lines(facts: Facts) -> list[str]:
    base = facts.base
    found = [
        "# The private figures",
        "",
        f"{base.data}, {base.private_model}, {base.clients} workers, {base.short_rounds} epochs; the best cell of each "
        f"method, and SN's best at β = 1, again for {base.rounds}. With noise the model has GroupNorm: BatchNorm's "
        "running statistics are functions of the data that no noise covers, so such a run has no ε and is refused. "
        "Highest test accuracy along a run, in percent; β is Clip21's threshold τ.",
        "",
        "**The paper's formula was asked for ε = 8; no run here has it.** Every table states the exact ε of its runs. "
        "They protect nobody; they are here to be compared with the paper's pictures.",
        "",
    ]
    for noise in NOISES:
        found += [f"## Noise read as {noise}", "", f"{SAYS[noise]}; {epsilons(facts, noise)}.", ""]
        for arm in PRIVATE_ARMS:
            values = grid(facts, noise, arm)
            shown = [
                [f"{beta:g}", *(text(v, ".2f") for v in line)]
                for beta, line in zip(base.private_betas, values, strict=True)
            ]
            found += [f"{arm.name}:", "", *to_markdown(("β \\ γ", *(f"{lr:g}" for lr in PRIVATE_LRS)), shown), ""]
        shown_by = [cell for cell in facts.part("private") if cell.reading == noise]
        found += [*_peaks(facts, noise), ""]
        found += facts.picture(f"private-{noise}.png", f"Heat maps, noise read as {noise}", shown_by)
    found += [f"## Noise read as {HOPELESS}", "", f"{SAYS[HOPELESS]}; {epsilons(facts, HOPELESS)}.", ""]
    hopeless = [row for row in rows(facts) if row["noise"] == HOPELESS]
    shown = [[row["method"], f"{row['beta']:g}", f"{row['lr']:g}", _ended(row)] for row in hopeless]
    found += [*to_markdown(("method", "β", "γ", "highest accuracy"), shown), ""]
    found += ["## In full", "", *_long(facts), ""]
    if facts.in_full():
        found += ["![Runs of half and of full length](lengths.png)", ""]
        found += ["A longer run is another configuration, and its noise is drawn anew: no noise is used twice.", ""]
    return [*found, "All numbers: [private.csv](private.csv)."]


def _peaks(facts: Facts, noise: str) -> list[str]:
    paper = {arms.DP_NORMEC.name: PEAK.text, arms.DP_NORMEC_SN.name: PEAK_SN.text}
    shown = [
        [
            arm.name,
            paper.get(arm.name, "–"),
            text(peak(facts, noise, arm), ".2f"),
            text(spread(facts, noise, arm), ".2f"),
        ]
        for arm in PRIVATE_ARMS
    ]
    return to_markdown(("method", "paper's highest", "ours", "largest spread over γ, β ≤ 0.01"), shown)


def _long(facts: Facts) -> list[str]:
    if not facts.in_full():
        return ["Not run: the best cells are chosen, on the images held out, when all of their kind have run."]
    shown = []
    for cell in facts.in_full():
        values = (facts.highest(facts.short_run(cell)), facts.first_half(cell), facts.highest(cell))
        shown.append(
            [cell.reading, cell.arm.name, f"{cell.beta:g}", f"{cell.lr:g}", *(text(one, ".2f") for one in values)]
        )
    base = facts.base
    lengths = (f"{base.short_rounds} epochs", f"first {base.short_rounds} of {base.rounds}", f"{base.rounds} epochs")
    header = ("noise", "method", "β", "γ", *lengths)
    return to_markdown(header, shown)


def _ended(row: Row) -> str:
    if row["best_test"] is None:
        return str(row["status"])
    return f"{row['best_test']:.2f}" + (", then diverged" if row["status"] == "diverged" else "")
