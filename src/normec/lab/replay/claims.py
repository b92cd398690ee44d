"""The paper's claims, one by one, judged by the records: held, held in part, not held, or waiting for cells not run.

A claim is cut into statements that numbers decide. Where the paper says "almost the same" or "hardly any change" a
point counts as that: see `CLOSE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..paper import arms
from ..paper.arms import Arm
from ..paper.published import SHORT_BETA
from ..tables import to_markdown
from . import page_alpha, page_private
from .facts import Facts
from .plan import MORE_BETAS, NOISES, half_of

CLOSE = 1.0  # points
BEST_BETA = 0.1


@dataclass(frozen=True)
class Statement:
    """One comparison: whether it holds (None: a cell is missing), and the numbers."""

    holds: bool | None
    text: str


@dataclass(frozen=True)
class Claim:
    says: str
    shown_by: str
    statements: Callable[[Facts], list[Statement]]

    def verdict(self, facts: Facts) -> str:
        found = [one.holds for one in self.statements(facts)]
        if not found or None in found:
            return "waits for cells not run"
        return "held" if all(found) else "held in part" if any(found) else "not held"


def _feedback(facts: Facts) -> list[Statement]:
    found = []
    for beta in MORE_BETAS:
        ours = facts.average(facts.find("tables", arms.NORMEC, beta))
        other = facts.average(facts.find("tables", arms.DPSGD, beta))
        if ours is None or other is None:
            found.append(Statement(None, f"β = {beta:g}: not run"))
        else:
            found.append(Statement(ours.value > other.value, f"β = {beta:g}: {ours} against {other}"))
    return found


def _alpha(facts: Facts) -> list[Statement]:
    found = []
    for beta, change in page_alpha.over_alpha(facts).items():
        words = "not run" if change is None else f"changes by {change:.2f} over α"
        found.append(Statement(None if change is None else change <= CLOSE, f"β = {beta:g}: {words}"))
    return found


def _beta(facts: Facts) -> list[Statement]:
    found = []
    for arm in (arms.NORMEC, arms.NORMEC_SN):
        values = {beta: facts.average(facts.find("tables", arm, beta)) for beta in facts.base.betas}
        known = {beta: value.value for beta, value in values.items() if value is not None}
        if len(known) < len(values):
            found.append(Statement(None, f"{arm.name}: {len(known)} of {len(values)} β run"))
            continue
        best, second = sorted(known, key=lambda beta: -known[beta])[:2]
        found.append(Statement(best == BEST_BETA, f"{arm.name}: best at β = {best:g} with {known[best]:.2f}"))
        lead = known[best] - known[second]
        clear = best == BEST_BETA and lead > CLOSE
        found.append(Statement(clear, f"{arm.name}: by more than {CLOSE:g}: {lead:.2f} over β = {second:g}"))
    return found


def _server_norm(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        for what, measure in (("highest accuracy", page_private.peak), ("spread over γ", page_private.spread)):
            without, with_ = (measure(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_NORMEC_SN))
            if without is None or with_ is None:
                found.append(Statement(None, f"{noise}, {what}: not run"))
            else:
                words = f"{noise}, {what}: {without:.2f} without SN, {with_:.2f} with"
                found.append(Statement(without > with_, words))
    return found


def _clip21(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        pairs = [_best_over_steps(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21)]
        for beta, ours, other in zip(facts.base.private_betas, *pairs, strict=True):
            if ours is None or other is None:
                found.append(Statement(None, f"{noise}, β = {beta:g}: not run"))
            else:
                found.append(Statement(ours > other, f"{noise}, β = {beta:g}: {ours:.2f} against {other:.2f}"))
    return found


def _best_over_steps(facts: Facts, noise: str, arm: Arm) -> list[float | None]:
    """By β, the highest accuracy over γ; None where a cell is missing."""
    lines = page_private.grid(facts, noise, arm)
    return [max(v for v in line if v is not None) if None not in line else None for line in lines]


def _short(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        long = [
            cell
            for cell in facts.cells
            if cell.chosen and cell.name in facts.records and cell.arm.name == arms.DP_NORMEC_SN.name
            if (cell.reading, cell.beta) == (noise, SHORT_BETA)
        ]
        if not long:
            found.append(Statement(None, f"{noise}: not run"))
            continue
        half = next(cell for cell in facts.cells if cell.name == half_of(long[0]))
        short, full = facts.highest(half), facts.highest(long[0])
        if short is None or full is None:
            found.append(Statement(False, f"{noise}: no accuracy before it diverged"))
        else:
            found.append(Statement(full - short <= CLOSE, f"{noise}: {short:.2f} after half, {full:.2f} in full"))
    return found


CLAIMS = (
    Claim("Error feedback beats direct normalisation at small β.", "[tables](tables.md)", _feedback),
    Claim("α-NormEC is stable in α.", "[α × β](alpha.md)", _alpha),
    Claim("β ≈ 0.1 is best.", "[tables](tables.md)", _beta),
    Claim(
        "With noise, server normalisation costs peak accuracy and buys robustness in γ.",
        "[private](private.md)",
        _server_norm,
    ),
    Claim("DP-α-NormEC (without SN) beats DP-Clip21.", "[private](private.md)", _clip21),
    Claim("At β = 1, half the rounds do as well (SN).", "[private](private.md)", _short),
)


def lines(facts: Facts, claims: Sequence[Claim] = CLAIMS) -> list[str]:
    """All claims in a table: what the paper says, the verdict, the numbers, where they are shown."""
    shown = [
        [
            claim.says,
            f"**{claim.verdict(facts)}**",
            "; ".join(_marked(one) for one in claim.statements(facts)),
            claim.shown_by,
        ]
        for claim in claims
    ]
    return [
        *to_markdown(("the paper says", "here", "by which numbers", "shown in"), shown),
        "",
        f'"Stable" and "as well" are read as: within {CLOSE:g} point. One seed where no spread is given.',
    ]


def _marked(one: Statement) -> str:
    return one.text + {True: " (yes)", False: " (no)", None: ""}[one.holds]
