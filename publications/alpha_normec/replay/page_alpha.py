"""Part 4 on a page: the highest accuracy over α × β."""

from __future__ import annotations

from typing import Any

from normec.experiments.tables import to_markdown

from ..figures import arms
from ..figures.published import BEST, BEST_AT, BY_BETA
from .facts import Facts, text
from .plan import Planned

Row = dict[str, Any]


def at(facts: Facts, alpha: float, beta: float) -> Planned:
    """The cell of the heat map; where α is the tables' own, it is theirs."""
    if alpha == facts.base.alpha:
        return facts.find("tables", arms.NORMEC_SN, beta)[0]
    return facts.find("alpha", arms.NORMEC_SN, beta, alpha=alpha)[0]


def grid(facts: Facts) -> list[list[float | None]]:
    """α down, β across."""
    return [[facts.highest(at(facts, alpha, beta)) for beta in facts.base.betas] for alpha in facts.base.alphas]


def rows(facts: Facts) -> list[Row]:
    found = []
    for alpha in facts.base.alphas:
        for beta in facts.base.betas:
            cell = at(facts, alpha, beta)
            record = facts.of(cell)
            final = record["final"]["test"] if record is not None else None
            best = facts.highest(cell)
            found.append({"alpha": alpha, "beta": beta, "lr": cell.lr, "best_test": best, "final_test": final})
    return found


def over_alpha(facts: Facts) -> dict[float, float | None]:
    """By β, how much the highest accuracy changes with α; None where a cell is missing."""
    columns = dict(zip(facts.base.betas, zip(*grid(facts), strict=True), strict=True))
    return {beta: max(v) - min(v) if None not in v else None for beta, v in columns.items()}


def lines(facts: Facts) -> list[str]:
    base, values = facts.base, grid(facts)
    shown = [[f"{alpha:g}", *(text(v, ".2f") for v in line)] for alpha, line in zip(base.alphas, values, strict=True)]
    paper = ["paper", *(BY_BETA[beta].text if beta in BY_BETA else "–" for beta in base.betas)]
    change = ["change over α", *(text(value, ".2f") for value in over_alpha(facts).values())]
    return [
        "# α × β",
        "",
        f"α-NormEC with SN, no noise; γ as in the paper's table of each β; {base.rounds} epochs, one seed. Highest "
        f"test accuracy along a run, in percent. The paper's best is {BEST.text} at α = {BEST_AT[0]:g}, "
        f"β = {BEST_AT[1]:g}.",
        "",
        *to_markdown(("α \\ β", *(f"{beta:g}" for beta in base.betas)), [*shown, paper, change]),
        "",
        *facts.picture(
            "alpha.png", "Heat map over α and β", [at(facts, a, b) for a in base.alphas for b in base.betas]
        ),
        "All numbers: [alpha.csv](alpha.csv).",
    ]
