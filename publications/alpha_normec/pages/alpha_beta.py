"""The page of part 4: the highest accuracy over α × β."""

from __future__ import annotations

from normec.experiments.export import Row, to_markdown

from ..methods import NORMEC_SN
from ..plan import Cell
from ..published import BEST, BEST_AT, BY_BETA
from ..results import Results, text


def at(results: Results, alpha: float, beta: float) -> Cell:
    """The cell at a point of the heat map, which is a cell of the tables at their α."""
    if alpha == results.base.alpha:
        return results.find("tables", NORMEC_SN, beta)[0]
    return results.find("alpha", NORMEC_SN, beta, alpha=alpha)[0]


def grid(results: Results) -> list[list[float | None]]:
    """α down, β across."""
    return [[results.highest(at(results, alpha, beta)) for beta in results.base.betas] for alpha in results.base.alphas]


def rows(results: Results) -> list[Row]:
    found = []
    for alpha in results.base.alphas:
        for beta in results.base.betas:
            cell = at(results, alpha, beta)
            record = results.of(cell)
            final = record["final"]["test"] if record is not None else None
            best = results.highest(cell)
            found.append({"alpha": alpha, "beta": beta, "lr": cell.lr, "best_test": best, "final_test": final})
    return found


def over_alpha(results: Results) -> dict[float, float | None]:
    """By β, the range of the highest accuracy over α; None if a cell is missing."""
    columns = dict(zip(results.base.betas, zip(*grid(results), strict=True), strict=True))
    return {beta: max(v) - min(v) if None not in v else None for beta, v in columns.items()}


def lines(results: Results) -> list[str]:
    base, values = results.base, grid(results)
    shown = [[f"{alpha:g}", *(text(v, ".2f") for v in line)] for alpha, line in zip(base.alphas, values, strict=True)]
    paper = ["paper", *(BY_BETA[beta].text if beta in BY_BETA else "–" for beta in base.betas)]
    change = ["change over α", *(text(value, ".2f") for value in over_alpha(results).values())]
    return [
        "# α × β",
        "",
        f"α-NormEC with SN and no noise, {base.rounds} epochs, one seed, γ as in the paper's table for each β. "
        f"Accuracies are the highest test accuracies along a run, in percent. The paper's best is {BEST.text} at α = "
        f"{BEST_AT[0]:g}, β = {BEST_AT[1]:g}.",
        "",
        *to_markdown(("α \\ β", *(f"{beta:g}" for beta in base.betas)), [*shown, paper, change]),
        "",
        *results.picture(
            "alpha.png", "Heat map over α and β", [at(results, a, b) for a in base.alphas for b in base.betas]
        ),
        "All numbers: [alpha.csv](alpha.csv).",
    ]
