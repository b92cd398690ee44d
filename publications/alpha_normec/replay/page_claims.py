"""Part 5 on a page: every claim of the paper with its verdict, the numbers that decide it, words, and its figure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping

from normec.experiments.tables import to_markdown

from ..figures import arms
from ..figures.published import PEAK, PEAK_SN, SHORT_BETA
from . import page_alpha, page_private
from .claims import CLAIMS, CLOSE, Claim, Statement, highest_in_full
from .facts import Facts
from .plan import NOISES, PRIVATE_LRS

FILE = "claims.md"
LEARNED = 30.0  # percent: of ten classes, a run below has learned little
PAGES: Mapping[str, str] = {  # where all numbers of a claim are
    "feedback": "tables.md",
    "alpha": "alpha.md",
    "beta": "tables.md",
    "server-norm": "private.md",
    "clip21": "private.md",
    "half": "private.md",
}


def lines(facts: Facts) -> list[str]:
    found = [
        "# The claims",
        "",
        "What the paper says of its experiments, cut into comparisons that numbers decide. *Held*: all of them agree; "
        f'*in part*: some do. "Stable" and "as well" are read as within {CLOSE:g} point, "best" also as by more than '
        "that. Accuracies are in percent on the test images: 1 and 3 are at the end of runs, means ± standard "
        "deviation over seeds where there are several; the others are the highest along a run, one seed.",
        "",
    ]
    for number, claim in enumerate(CLAIMS, 1):
        found += [f"## {number}. {claim.says}", "", f"**{claim.verdict(facts).capitalize()}.** {_words(facts, claim)}"]
        shown = [[one.where, one.numbers, _mark(one)] for one in claim.statements(facts)]
        found += ["", *to_markdown(("where", "numbers", "agrees"), shown), "", *_figures(facts, claim)]
        found += [f"All numbers: [{PAGES[claim.key]}]({PAGES[claim.key]}).", ""]
    return found


def _figures(facts: Facts, claim: Claim) -> list[str]:
    if claim.key in ("feedback", "beta"):
        return facts.picture("betas.png", "Final accuracy by β, ours and the paper's", facts.part("tables"))
    if claim.key == "alpha":
        cells = [page_alpha.at(facts, alpha, beta) for alpha in facts.base.alphas for beta in facts.base.betas]
        return facts.picture("alpha.png", "Heat map over α and β", cells)
    if claim.key == "half":
        return facts.picture("lengths.png", "Runs of half and of full length", facts.in_full())
    found = []
    for noise in NOISES:
        cells = [cell for cell in facts.part("private") if cell.reading == noise]
        found += facts.picture(f"private-{noise}.png", f"Heat maps, noise read as {noise}", cells)
    return found


def summary(facts: Facts) -> list[str]:
    """One line a claim, with the way to its section."""
    shown = []
    for number, claim in enumerate(CLAIMS, 1):
        found = [one.holds for one in claim.statements(facts)]
        agree = f"{found.count(True)} of {len(found)}"
        shown.append([f"[{claim.says}]({FILE}#{_anchor(number, claim)})", f"**{claim.verdict(facts)}**", agree])
    return to_markdown(("the paper says", "here", "comparisons that agree"), shown)


def _anchor(number: int, claim: Claim) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w\- ]", "", f"{number}. {claim.says}".lower()).replace(" ", "-")


def _mark(one: Statement) -> str:
    return {True: "yes", False: "no", None: "–"}[one.holds]


def _words(facts: Facts, claim: Claim) -> str:
    """What the numbers mean; nothing before all of them are there."""
    return "" if any(one.holds is None for one in claim.statements(facts)) else WORDS[claim.key](facts)


def _feedback(facts: Facts) -> str:
    leads = []
    for beta in facts.base.betas:
        ours, other = (facts.average(facts.find("tables", arm, beta)) for arm in (arms.NORMEC, arms.DPSGD))
        if ours is not None and other is not None:
            leads.append(f"{ours.value - other.value:+.1f} at β = {beta:g}")
    return (
        f"The lead of error feedback by β: {', '.join(leads)}. Without it x moves by at most γβ a round, however far "
        "it has to go; with it the mean of the memories grows until it is as long as the gradient. The larger β, the "
        "less there is to repair."
    )


def _alpha(facts: Facts) -> str:
    change = max(value for value in page_alpha.over_alpha(facts).values() if value is not None)
    wide = max(facts.base.alphas) / min(facts.base.alphas)
    ranges = []
    for beta in facts.base.betas:
        known = [facts.highest(cell) for cell in facts.find("tables", arms.NORMEC_SN, beta)]
        values = [value for value in known if value is not None]
        if len(values) > 1:
            ranges.append(max(values) - min(values))
    seeds = f"; over the seeds of one cell it changes by up to {max(ranges):.2f}" if ranges else ""
    return f"Over α, up to {wide:g} times its smallest, no column changes by more than {change:.2f} points{seeds}."


def _beta(facts: Facts) -> str:
    falls = []
    for arm in (arms.NORMEC, arms.NORMEC_SN):
        values = [facts.average(facts.find("tables", arm, beta)) for beta in facts.base.betas]
        known = [one.value for one in values if one is not None]
        falls.append(f"{max(known) - min(known):.1f} ({arm.name})")
    return f"From the best β to the worst of {len(facts.base.betas)} accuracy falls by {' and '.join(falls)} points."


def _server_norm(facts: Facts) -> str:
    costs = []
    for noise in NOISES:
        without, with_ = (page_private.peak(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_NORMEC_SN))
        if without is not None and with_ is not None:
            costs.append(f"{with_ - without:+.1f} points ({noise})")
    betas = facts.base.private_betas
    gains = [
        f"at β = {beta:g} " + ", ".join(f"{_gain(facts, at, step):+.1f}" for step in range(len(PRIVATE_LRS)))
        for at, beta in enumerate(betas)
        if beta in (min(betas), max(betas))
    ]
    return (
        f"With SN the highest accuracy changes by {', '.join(costs)}; the paper's by {PEAK_SN.low - PEAK.low:+.1f}. A "
        "step is γ long with SN, γ‖ĝ‖ without: SN lengthens the steps where β is small and ĝ short, and shortens them "
        f"where β is large and ĝ long with noise. What it brings, mean over the readings, by γ = "
        f"{', '.join(f'{lr:g}' for lr in PRIVATE_LRS)}: {'; '.join(gains)}."
    )


def _gain(facts: Facts, at: int, step: int) -> float:
    """What SN adds at a β and γ, given by their places."""
    pairs = [
        [page_private.grid(facts, noise, arm)[at][step] for arm in (arms.DP_NORMEC_SN, arms.DP_NORMEC)]
        for noise in NOISES
    ]
    return statistics.fmean(one - other for one, other in pairs if one is not None and other is not None)


def _clip21(facts: Facts) -> str:
    short, long = [], []
    for noise in NOISES:
        ours, other = (page_private.peak(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21))
        if ours is not None and other is not None:
            short.append(f"{ours - other:+.1f} ({noise})")
        ours, other = (highest_in_full(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21))
        if ours is not None and other is not None:
            long.append(f"{ours - other:+.1f} ({noise})")
    return (
        f"At each method's best β and γ the lead of DP-NormEC is {', '.join(short)} after {facts.base.short_rounds} "
        f"epochs, {', '.join(long)} after {facts.base.rounds}. For comparison, another draw of the noise changes a "
        f"cell by up to {_another_draw(facts):.1f} points: the runs in full draw anew, and this is how far the first "
        f"{facts.base.short_rounds} epochs of one are from its short run."
    )


def _another_draw(facts: Facts) -> float:
    """How far apart two runs of one cell are whose noise alone differs: a run in full is drawn anew from the start."""
    apart = [0.0]
    for cell in facts.in_full():
        short, first = facts.highest(facts.short_run(cell)), facts.first_half(cell)
        if short is not None and first is not None:
            apart.append(abs(first - short))
    return max(apart)


def _half(facts: Facts) -> str:
    peaks, ends, gains = [], [], []
    for cell in facts.in_full():
        first, best = facts.first_half(cell), facts.highest(cell)
        if cell.arm.name != arms.DP_NORMEC_SN.name or first is None or best is None:
            continue
        if cell.beta == SHORT_BETA:
            peaks.append(best)
            ends.append((facts.records[cell.name]["best"]["test_epoch"], facts.records[cell.name]["final"]["test"]))
        else:
            gains.append(f"{best - first:+.1f} (β = {cell.beta:g}, {cell.reading})")
    words = f"Noise enters ĝ with the factor β and stays there: at β = {SHORT_BETA:g} more rounds bring more of it."
    if max(peaks, default=LEARNED) < LEARNED:
        most = ", ".join(f"{value:.1f} % (epoch {epoch})" for value, (epoch, _) in zip(peaks, ends, strict=True))
        last = ", ".join("diverged" if value is None else f"{value:.1f} %" for _, value in ends)
        words = f"But these runs learn little: at best {most}, in the end {last}; guessing has 10 %. {words}"
    return words + (f" At SN's best β the second half is worth {', '.join(gains)} points." if gains else "")


WORDS: Mapping[str, Callable[[Facts], str]] = {
    "feedback": _feedback,
    "alpha": _alpha,
    "beta": _beta,
    "server-norm": _server_norm,
    "clip21": _clip21,
    "half": _half,
}
