"""The paper's claims, one by one, judged by the records: held, held in part, not held, or waiting for cells not run.

A claim is cut into statements that numbers decide. Where the paper says "almost the same" or "hardly any change" a
point counts as that: see `CLOSE`. What the numbers mean in words is on the page of `page_claims`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..figures import arms
from ..figures.arms import Arm
from ..figures.published import SHORT_BETA, SPREAD_BETAS
from . import page_alpha, page_private
from .facts import NOT_RUN, Facts
from .plan import MORE_BETAS, NOISES

CLOSE = 1.0  # points
BEST_BETA = 0.1


@dataclass(frozen=True)
class Statement:
    """One comparison: whether it holds (None: a cell is missing), where, and the numbers."""

    holds: bool | None
    where: str
    numbers: str = NOT_RUN


@dataclass(frozen=True)
class Claim:
    key: str
    says: str
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
            found.append(Statement(None, f"β = {beta:g}"))
        else:
            found.append(Statement(ours.value > other.value, f"β = {beta:g}", f"{ours} against {other}"))
    return found


def _alpha(facts: Facts) -> list[Statement]:
    return [
        Statement(None, f"β = {beta:g}")
        if change is None
        else Statement(change <= CLOSE, f"β = {beta:g}", f"changes by {change:.2f} over α")
        for beta, change in page_alpha.over_alpha(facts).items()
    ]


def _beta(facts: Facts) -> list[Statement]:
    found = []
    for arm in (arms.NORMEC, arms.NORMEC_SN):
        values = {beta: facts.average(facts.find("tables", arm, beta)) for beta in facts.base.betas}
        known = {beta: value.value for beta, value in values.items() if value is not None}
        if len(known) < len(values):
            found.append(Statement(None, arm.name, f"{len(known)} of {len(values)} β run"))
            continue
        best, second = sorted(known, key=lambda beta: -known[beta])[:2]
        found.append(Statement(best == BEST_BETA, arm.name, f"best at β = {best:g} with {values[best]}"))
        lead = known[best] - known[second]
        clear = best == BEST_BETA and lead > CLOSE
        found.append(Statement(clear, f"{arm.name}, by more than {CLOSE:g} point", f"{lead:.2f} over β = {second:g}"))
    return found


def _server_norm(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        spread = f"spread over γ, β ≤ {max(SPREAD_BETAS):g}"
        for what, measure in (("highest accuracy", page_private.peak), (spread, page_private.spread)):
            without, with_ = (measure(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_NORMEC_SN))
            if without is None or with_ is None:
                found.append(Statement(None, f"{noise}, {what}"))
            else:
                numbers = f"{without:.2f} without SN, {with_:.2f} with"
                found.append(Statement(without > with_, f"{noise}, {what}", numbers))
    return found


def _clip21(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        pairs = [_best_over_steps(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21)]
        for beta, ours, other in zip(facts.base.private_betas, *pairs, strict=True):
            found.append(_beats(ours, other, f"{noise}, β = {beta:g}"))
        ours, other = (highest_in_full(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21))
        found.append(_beats(ours, other, f"{noise}, the best β in full length"))
    return found


def _beats(ours: float | None, other: float | None, where: str) -> Statement:
    if ours is None or other is None:
        return Statement(None, where)
    return Statement(ours > other, where, f"{ours:.2f} against {other:.2f}")


def highest_in_full(facts: Facts, noise: str, arm: Arm) -> float | None:
    known = [facts.highest(cell) for cell in facts.in_full(noise, arm)]
    return max((value for value in known if value is not None), default=None)


def _best_over_steps(facts: Facts, noise: str, arm: Arm) -> list[float | None]:
    """By β, the highest accuracy over γ; None where a cell is missing."""
    lines = page_private.grid(facts, noise, arm)
    return [max(v for v in line if v is not None) if None not in line else None for line in lines]


def _short(facts: Facts) -> list[Statement]:
    found = []
    for noise in NOISES:
        long = [cell for cell in facts.in_full(noise, arms.DP_NORMEC_SN) if cell.beta == SHORT_BETA]
        if not long:
            found.append(Statement(None, noise))
            continue
        half, full = facts.first_half(long[0]), facts.highest(long[0])
        if half is None or full is None:
            found.append(Statement(False, noise, "no accuracy before it diverged"))
        else:
            found.append(Statement(full - half <= CLOSE, noise, f"{half:.2f} in the first half, {full:.2f} in all"))
    return found


CLAIMS = (
    Claim("feedback", "Error feedback beats direct normalisation at small β.", _feedback),
    Claim("alpha", "α-NormEC is stable in α.", _alpha),
    Claim("beta", "β ≈ 0.1 is best.", _beta),
    Claim(
        "server-norm", "With noise, server normalisation costs peak accuracy and buys robustness in γ.", _server_norm
    ),
    Claim("clip21", "DP-α-NormEC (without SN) beats DP-Clip21.", _clip21),
    Claim("half", "At β = 1, half the rounds do as well (SN).", _short),
)
