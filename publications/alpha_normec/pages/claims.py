"""The page of the claims: each claim of the paper, a verdict, the numbers that decide it, and an explanation.

A claim is split into statements that numbers decide. "Stable" and "as well" mean within `CLOSE`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from normec.experiments.export import to_markdown

from ..methods import DP_CLIP21, DP_NORMEC, DP_NORMEC_SN, DPSGD, NORMEC, NORMEC_SN, PaperMethod
from ..plan import MORE_BETAS, NOISES
from ..published import PEAK, PEAK_SN, SHORT_BETA, SPREAD_BETAS
from ..results import NOT_RUN, Results
from . import alpha_beta, private

FILE = "claims.md"
LEARNED = 30.0  # percent; with ten classes, a run below this has learned little
PAGES: Mapping[str, str] = {  # the page with all numbers of a claim
    "feedback": "tables.md",
    "alpha": "alpha.md",
    "beta": "tables.md",
    "server-norm": "private.md",
    "clip21": "private.md",
    "half": "private.md",
}
CLOSE = 1.0  # points
BEST_BETA = 0.1


@dataclass(frozen=True)
class Statement:
    """One comparison: whether it holds (None if a cell is missing), where, and the numbers."""

    holds: bool | None
    where: str
    numbers: str = NOT_RUN


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the statements that decide it."""

    key: str
    says: str
    statements: Callable[[Results], list[Statement]]

    def verdict(self, results: Results) -> str:
        found = [one.holds for one in self.statements(results)]
        if not found or None in found:
            return "waiting for cells"
        return "held" if all(found) else "held in part" if any(found) else "not held"


def _feedback(results: Results) -> list[Statement]:
    found = []
    for beta in MORE_BETAS:
        ours = results.average(results.find("tables", NORMEC, beta))
        other = results.average(results.find("tables", DPSGD, beta))
        if ours is None or other is None:
            found.append(Statement(None, f"β = {beta:g}"))
        else:
            found.append(Statement(ours.value > other.value, f"β = {beta:g}", f"{ours} against {other}"))
    return found


def _alpha(results: Results) -> list[Statement]:
    return [
        Statement(None, f"β = {beta:g}")
        if change is None
        else Statement(change <= CLOSE, f"β = {beta:g}", f"changes by {change:.2f} over α")
        for beta, change in alpha_beta.over_alpha(results).items()
    ]


def _beta(results: Results) -> list[Statement]:
    found = []
    for method in (NORMEC, NORMEC_SN):
        values = {beta: results.average(results.find("tables", method, beta)) for beta in results.base.betas}
        known = {beta: value.value for beta, value in values.items() if value is not None}
        if len(known) < len(values):
            found.append(Statement(None, method.name, f"{len(known)} of {len(values)} β run"))
            continue
        best, second = sorted(known, key=lambda beta: -known[beta])[:2]
        found.append(Statement(best == BEST_BETA, method.name, f"best at β = {best:g} with {values[best]}"))
        lead = known[best] - known[second]
        clear = best == BEST_BETA and lead > CLOSE
        where = f"{method.name}, by more than {CLOSE:g} point"
        found.append(Statement(clear, where, f"{lead:.2f} over β = {second:g}"))
    return found


def _server_norm(results: Results) -> list[Statement]:
    found = []
    for noise in NOISES:
        spread = f"spread over γ, β ≤ {max(SPREAD_BETAS):g}"
        for what, measure in (("highest accuracy", private.peak), (spread, private.spread)):
            without, with_ = (measure(results, noise, method) for method in (DP_NORMEC, DP_NORMEC_SN))
            if without is None or with_ is None:
                found.append(Statement(None, f"{noise}, {what}"))
            else:
                numbers = f"{without:.2f} without SN, {with_:.2f} with"
                found.append(Statement(without > with_, f"{noise}, {what}", numbers))
    return found


def _clip21(results: Results) -> list[Statement]:
    found = []
    for noise in NOISES:
        pairs = [_best_over_steps(results, noise, method) for method in (DP_NORMEC, DP_CLIP21)]
        for beta, ours, other in zip(results.base.private_betas, *pairs, strict=True):
            found.append(_beats(ours, other, f"{noise}, β = {beta:g}"))
        ours, other = (highest_in_full(results, noise, method) for method in (DP_NORMEC, DP_CLIP21))
        found.append(_beats(ours, other, f"{noise}, the best β, runs of full length"))
    return found


def _beats(ours: float | None, other: float | None, where: str) -> Statement:
    if ours is None or other is None:
        return Statement(None, where)
    return Statement(ours > other, where, f"{ours:.2f} against {other:.2f}")


def highest_in_full(results: Results, noise: str, method: PaperMethod) -> float | None:
    known = [results.highest(cell) for cell in results.in_full(noise, method)]
    return max((value for value in known if value is not None), default=None)


def _best_over_steps(results: Results, noise: str, method: PaperMethod) -> list[float | None]:
    """By β, the highest accuracy over γ; None if a cell is missing."""
    lines = private.grid(results, noise, method)
    return [max(v for v in line if v is not None) if None not in line else None for line in lines]


def _short(results: Results) -> list[Statement]:
    found = []
    for noise in NOISES:
        long = [cell for cell in results.in_full(noise, DP_NORMEC_SN) if cell.beta == SHORT_BETA]
        if not long:
            found.append(Statement(None, noise))
            continue
        half, full = results.first_half(long[0]), results.highest(long[0])
        if half is None or full is None:
            found.append(Statement(False, noise, "no accuracy before the run diverged"))
        else:
            numbers = f"{half:.2f} in the first half, {full:.2f} in the whole run"
            found.append(Statement(full - half <= CLOSE, noise, numbers))
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


def lines(results: Results) -> list[str]:
    found = [
        "# The claims",
        "",
        "Each claim of the paper is split into comparisons that numbers decide. *Held* means that all of them agree, "
        f'*held in part* that some do. "Stable" and "as well" mean within {CLOSE:g} point; "best" also means by more '
        "than that. Accuracies are in percent on the test images. Claims 1 and 3 are about the end of runs, with mean "
        "± standard deviation where there are several seeds; the others are about the highest accuracy along a run, "
        "with one seed.",
        "",
    ]
    for number, claim in enumerate(CLAIMS, 1):
        verdict = claim.verdict(results).capitalize()
        found += [f"## {number}. {claim.says}", "", f"**{verdict}.** {_explanation(results, claim)}"]
        shown = [[one.where, one.numbers, _mark(one)] for one in claim.statements(results)]
        found += ["", *to_markdown(("where", "numbers", "agrees"), shown), "", *_figures(results, claim)]
        found += [f"All numbers: [{PAGES[claim.key]}]({PAGES[claim.key]}).", ""]
    return found


def _figures(results: Results, claim: Claim) -> list[str]:
    if claim.key in ("feedback", "beta"):
        return results.picture("betas.png", "Final accuracy by β, ours and the paper's", results.part("tables"))
    if claim.key == "alpha":
        cells = [alpha_beta.at(results, alpha, beta) for alpha in results.base.alphas for beta in results.base.betas]
        return results.picture("alpha.png", "Heat map over α and β", cells)
    if claim.key == "half":
        return results.picture("lengths.png", "Runs of half and of full length", results.in_full())
    found = []
    for noise in NOISES:
        cells = [cell for cell in results.part("private") if cell.reading == noise]
        found += results.picture(f"private-{noise}.png", f"Heat maps, noise read as {noise}", cells)
    return found


def summary(results: Results, page: str) -> list[str]:
    """A table with one row per claim and links to their sections."""
    shown = []
    for number, claim in enumerate(CLAIMS, 1):
        found = [one.holds for one in claim.statements(results)]
        agree = f"{found.count(True)} of {len(found)}"
        shown.append([f"[{claim.says}]({page}#{_anchor(number, claim)})", f"**{claim.verdict(results)}**", agree])
    return to_markdown(("claim", "verdict", "comparisons that agree"), shown)


def _anchor(number: int, claim: Claim) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", f"{number}. {claim.says}".lower()).replace(" ", "-")


def _mark(one: Statement) -> str:
    return {True: "yes", False: "no", None: "–"}[one.holds]


def _explanation(results: Results, claim: Claim) -> str:
    """The explanation of a claim, once all its cells have run."""
    return "" if any(one.holds is None for one in claim.statements(results)) else EXPLANATIONS[claim.key](results)


def _explain_feedback(results: Results) -> str:
    leads = []
    for beta in results.base.betas:
        ours, other = (results.average(results.find("tables", method, beta)) for method in (NORMEC, DPSGD))
        if ours is not None and other is not None:
            leads.append(f"{ours.value - other.value:+.1f} at β = {beta:g}")
    return (
        f"The lead of error feedback by β: {', '.join(leads)}. Without error feedback x moves by at most γβ per round, "
        "however far it has to go; with it the mean of the memories grows until it is as long as the gradient. The "
        "larger β is, the less there is to repair."
    )


def _explain_alpha(results: Results) -> str:
    change = max(value for value in alpha_beta.over_alpha(results).values() if value is not None)
    wide = max(results.base.alphas) / min(results.base.alphas)
    ranges = []
    for beta in results.base.betas:
        known = [results.highest(cell) for cell in results.find("tables", NORMEC_SN, beta)]
        values = [value for value in known if value is not None]
        if len(values) > 1:
            ranges.append(max(values) - min(values))
    seeds = f"; over the seeds of one cell it changes by up to {max(ranges):.2f}" if ranges else ""
    return f"Over a range of α of {wide:g} times no column changes by more than {change:.2f} points{seeds}."


def _explain_beta(results: Results) -> str:
    falls = []
    for method in (NORMEC, NORMEC_SN):
        values = [results.average(results.find("tables", method, beta)) for beta in results.base.betas]
        known = [one.value for one in values if one is not None]
        falls.append(f"{max(known) - min(known):.1f} ({method.name})")
    count = len(results.base.betas)
    return f"From the best to the worst of {count} values of β accuracy falls by {' and '.join(falls)} points."


def _explain_server_norm(results: Results) -> str:
    costs = []
    for noise in NOISES:
        without, with_ = (private.peak(results, noise, method) for method in (DP_NORMEC, DP_NORMEC_SN))
        if without is not None and with_ is not None:
            costs.append(f"{with_ - without:+.1f} points ({noise})")
    betas, steps = results.base.private_betas, range(len(results.base.private_lrs))
    gains = [
        f"at β = {beta:g} " + ", ".join(f"{_gain(results, at, step):+.1f}" for step in steps)
        for at, beta in enumerate(betas)
        if beta in (min(betas), max(betas))
    ]
    return (
        f"With SN the highest accuracy changes by {', '.join(costs)}; in the paper by {PEAK_SN.low - PEAK.low:+.1f}. "
        "The length of a step is γ with SN and γ‖ĝ‖ without: SN lengthens the steps where β is small and ĝ is short, "
        "and shortens them where β is large and noise makes ĝ long. The gain of SN, as mean over the readings, for γ = "
        f"{', '.join(f'{lr:g}' for lr in results.base.private_lrs)}: {'; '.join(gains)}."
    )


def _gain(results: Results, at: int, step: int) -> float:
    """The gain of SN at a β and γ, which are given by their positions."""
    pairs = [
        [private.grid(results, noise, method)[at][step] for method in (DP_NORMEC_SN, DP_NORMEC)] for noise in NOISES
    ]
    return statistics.fmean(one - other for one, other in pairs if one is not None and other is not None)


def _explain_clip21(results: Results) -> str:
    short, long = [], []
    for noise in NOISES:
        ours, other = (private.peak(results, noise, method) for method in (DP_NORMEC, DP_CLIP21))
        if ours is not None and other is not None:
            short.append(f"{ours - other:+.1f} ({noise})")
        ours, other = (highest_in_full(results, noise, method) for method in (DP_NORMEC, DP_CLIP21))
        if ours is not None and other is not None:
            long.append(f"{ours - other:+.1f} ({noise})")
    return (
        f"At each method's best β and γ the lead of DP-NormEC is {', '.join(short)} after {results.base.short_rounds} "
        f"epochs and {', '.join(long)} after {results.base.rounds}. For comparison, another draw of the noise changes "
        f"a cell by up to {_another_draw(results):.1f} points: this is the largest difference between the first "
        f"{results.base.short_rounds} epochs of a run of full length and the short run, whose noise is independent."
    )


def _another_draw(results: Results) -> float:
    """The largest difference between two runs of a cell that differ in their noise alone."""
    apart = [0.0]
    for cell in results.in_full():
        short, first = results.highest(results.short_run(cell)), results.first_half(cell)
        if short is not None and first is not None:
            apart.append(abs(first - short))
    return max(apart)


def _explain_half(results: Results) -> str:
    peaks, ends, gains = [], [], []
    for cell in results.in_full():
        first, best = results.first_half(cell), results.highest(cell)
        if cell.method.name != DP_NORMEC_SN.name or first is None or best is None:
            continue
        if cell.beta == SHORT_BETA:
            peaks.append(best)
            ends.append((results.records[cell.name]["best"]["test_epoch"], results.records[cell.name]["final"]["test"]))
        else:
            gains.append(f"{best - first:+.1f} (β = {cell.beta:g}, {cell.reading})")
    words = f"Noise enters ĝ with the factor β and stays there: at β = {SHORT_BETA:g} more rounds add more of it."
    if max(peaks, default=LEARNED) < LEARNED:
        most = ", ".join(f"{value:.1f} % (epoch {epoch})" for value, (epoch, _) in zip(peaks, ends, strict=True))
        last = ", ".join("diverged" if value is None else f"{value:.1f} %" for _, value in ends)
        words = f"But these runs learn little: at best {most}, in the end {last}; guessing reaches 10 %. {words}"
    return words + (f" At the best β with SN the second half adds {', '.join(gains)} points." if gains else "")


EXPLANATIONS: Mapping[str, Callable[[Results], str]] = {
    "feedback": _explain_feedback,
    "alpha": _explain_alpha,
    "beta": _explain_beta,
    "server-norm": _explain_server_norm,
    "clip21": _explain_clip21,
    "half": _explain_half,
}
