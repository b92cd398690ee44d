"""Part 5 on a page: every claim of the paper with its verdict, the numbers that decide it, words, and its figure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from ..paper import arms
from ..paper.published import PEAK, PEAK_SN, SHORT_BETA
from ..tables import to_markdown
from . import page_alpha, page_private
from .claims import CLAIMS, CLOSE, Claim, Statement, in_full, lengths
from .facts import Facts
from .plan import NOISES, PRIVATE_ARMS

FILE = "claims.md"
LEARNED = 30.0  # percent: of ten classes, a run below has learned little
_PRIVATE = tuple((f"private-{noise}.png", f"Heat maps, noise read as {noise}", "private.md") for noise in NOISES)
_BY_BETA = ("betas.png", "Final accuracy by β, ours and the paper's", "tables.md")
FIGURES: Mapping[str, Sequence[tuple[str, str, str]]] = {  # a picture, its title, the page with all its numbers
    "feedback": (_BY_BETA,),
    "alpha": (("alpha.png", "Heat map over α and β", "alpha.md"),),
    "beta": (_BY_BETA,),
    "server-norm": _PRIVATE,
    "clip21": _PRIVATE,
    "half": (("lengths.png", "Runs of half and of full length", "private.md"),),
}


def lines(facts: Facts) -> list[str]:
    found = [
        "# The claims",
        "",
        "What the paper says of its experiments, cut into comparisons that numbers decide. *Held*: all of them agree; "
        f'*in part*: some do. "Stable" and "as well" are read as: within {CLOSE:g} point. Accuracies are in percent on '
        "the test images, at the end of a run without noise, the highest along one with noise; one seed where no "
        "spread is given.",
        "",
    ]
    for number, claim in enumerate(CLAIMS, 1):
        found += [f"## {number}. {claim.says}", "", f"**{claim.verdict(facts).capitalize()}.** {_words(facts, claim)}"]
        shown = [[one.where, one.numbers, _mark(one)] for one in claim.statements(facts)]
        found += ["", *to_markdown(("where", "numbers", "agrees"), shown), ""]
        for file, title, page in FIGURES[claim.key]:
            found += facts.picture(file, title, facts.part(page.removesuffix(".md")))
        pages = dict.fromkeys(f"[{page}]({page})" for _, _, page in FIGURES[claim.key])
        found += [f"All numbers: {', '.join(pages)}.", ""]
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
        f"Its lead by β: {', '.join(leads)}. Without feedback x moves by at most γβ a round, however far it has to go; "
        "with it the clients' memories grow until their sum is as long as the gradient. The larger β, the less of a "
        "handicap that is."
    )


def _alpha(facts: Facts) -> str:
    change = max(value for value in page_alpha.over_alpha(facts).values() if value is not None)
    known = [facts.average(facts.find("tables", arms.NORMEC_SN, beta), "best") for beta in facts.base.betas]
    spreads = [one.spread for one in known if one is not None and one.spread is not None]
    seeds = f"; three seeds of one cell have a standard deviation of up to {max(spreads):.2f}" if spreads else ""
    wide = max(facts.base.alphas) / min(facts.base.alphas)
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
    gains = []
    for at, beta in enumerate(facts.base.private_betas):
        grids = [(page_private.grid(facts, noise, arm)[at], sign) for noise in NOISES for arm, sign in _SIGNS]
        away = [sign * value for line, sign in grids for value in line if value is not None]
        gains.append(f"{2 * statistics.fmean(away):+.1f} at β = {beta:g}")
    return (
        f"With SN the highest accuracy changes by {', '.join(costs)}; the paper's by {PEAK_SN.low - PEAK.low:+.1f}. "
        f"What SN brings, averaged over γ and both readings: {', '.join(gains)}. At small β ĝ is short, and without SN "
        "x hardly moves; at large β ĝ is mostly noise, and SN lets x go the noise's way at full speed."
    )


def _clip21(facts: Facts) -> str:
    short, long = [], []
    for noise in NOISES:
        ours, other = (page_private.peak(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21))
        if ours is not None and other is not None:
            short.append(f"{ours - other:+.1f} ({noise})")
        cells = [in_full(facts, noise, arm) for arm in (arms.DP_NORMEC, arms.DP_CLIP21)]
        full = [facts.highest(found[0]) for found in cells if found]
        if len(full) == 2 and full[0] is not None and full[1] is not None:
            long.append(f"{full[0] - full[1]:+.1f} ({noise})")
    return (
        f"At each method's best β and γ its lead over DP-Clip21 is {', '.join(short)} after "
        f"{facts.base.short_rounds} epochs, {', '.join(long)} after {facts.base.rounds}. For comparison, "
        f"another draw of the noise changes a cell by up to {_another_draw(facts):.1f} points (the runs in full draw "
        f"anew; their highest accuracy in the first {facts.base.short_rounds} epochs against that of the short runs)."
    )


def _another_draw(facts: Facts) -> float:
    """How far apart two runs of one cell are whose noise alone differs: a run in full is drawn anew from the start."""
    apart = [0.0]
    for cell in (cell for noise in NOISES for arm in PRIVATE_ARMS for cell in in_full(facts, noise, arm)):
        short, curve = lengths(facts, cell)[0], facts.records[cell.name]["curve"]
        pairs = zip(curve["epoch"], curve["test"], strict=True)
        first = [value for epoch, value in pairs if epoch <= facts.base.short_rounds and value is not None]
        if short is not None and first:
            apart.append(abs(max(first) - short))
    return max(apart)


def _half(facts: Facts) -> str:
    low: list[float] = []
    gains, peaks = [], []
    for noise in NOISES:
        for cell in in_full(facts, noise, arms.DP_NORMEC_SN):
            short, full = lengths(facts, cell)
            if short is None or full is None:
                continue
            if cell.beta == SHORT_BETA:
                low.append(short)
                peaks.append(facts.records[cell.name]["best"]["test_epoch"])
            else:
                gains.append(f"{full - short:+.1f} (β = {cell.beta:g}, {noise})")
    words = f"Noise enters ĝ with the factor β and stays there: at β = {SHORT_BETA:g} more rounds bring more of it."
    if max(low, default=LEARNED) < LEARNED:
        values = ", ".join(f"{value:.1f} %" for value in low)
        words = (
            f"But these runs have learned little: {values} at their best, where guessing has 10 %; the runs in full "
            f"come to it by epoch {max(peaks)}, and lose it again. {words}"
        )
    return words + (f" At SN's best β the second half is worth {', '.join(gains)} points." if gains else "")


_SIGNS = ((arms.DP_NORMEC_SN, 1), (arms.DP_NORMEC, -1))
WORDS: Mapping[str, Callable[[Facts], str]] = {
    "feedback": _feedback,
    "alpha": _alpha,
    "beta": _beta,
    "server-norm": _server_norm,
    "clip21": _clip21,
    "half": _half,
}
