"""The privacy of a run in words: who is protected from whom, how strongly, and what is not covered; and its ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import NormalDist
from typing import Any

from ..errors import UsageError
from ..privacy.display import shown_delta, shown_epsilon
from ..storage.history import NOT_COVERED
from ..system.files import read_bytes
from . import formatting, schema
from .document import Section, cards
from .html import Html, e, join, table
from .run_view import MOST_BYTES, SIMULATION, RunView

WATCHERS = {
    "local": "a server that sees every message",
    "secure-sum": "a server that sees only sums",
    "central": "everyone but the trusted server",
}
MOST_LINES = 400
WARNED = f"Where this page shows them, they are {NOT_COVERED}."
Lines = list[dict[str, Any]]


def phrase(view: RunView) -> str:
    """For the first sentence: ``with (8, 1e-05)-differential privacy for each client against …``."""
    if not view.private:
        return "without privacy"
    terms = view.terms
    whom = f"for each {terms.get('unit', 'client')} against {WATCHERS.get(str(terms.get('trust')), 'its observer')}"
    how = "in a simulation of" if view.simulation else "with"
    if view.epsilon is None:
        return f"{how} differential privacy {whom}"
    # No line break inside: no-break space and hyphen.
    strength = f"({shown_epsilon(view.epsilon)},\u00a0{_power(terms.get('delta'))})"
    return f"{how} {strength}\u2011differential privacy {whom}"


def badge(views: Sequence[RunView]) -> Html | None:
    """A prominent mark for private runs with seeded noise."""
    private = [view for view in views if view.private]
    seeded = sum(view.simulation for view in private)
    if not seeded:
        return None
    which = f" ({seeded} of {len(private)} private runs)" if seeded < len(private) else ""
    return e("p", SIMULATION, which, class_="badge", role="note")


def warning(views: Sequence[RunView]) -> Html | None:
    """A warning about the data of private runs on the page that the guarantee does not cover."""
    if not any(view.uncovered or view.clients for view in views if view.private):
        return None
    text = (
        "Losses, gradient and message norms, memory errors and tables of clients of private runs are measured without "
        f"noise. {WARNED}"
    )
    return e("p", text, class_="callout")


def sections(view: RunView, chart: Html) -> list[Section]:
    """The statement and, for a private run, its ledger."""
    if not view.private:
        return [Section("privacy", "Privacy", _unprotected())]
    lines, fault = ledger_lines(view)
    return [
        Section("privacy", "Privacy", _statement(view, lines, chart)),
        Section("ledger", "Ledger", _ledger(lines, fault, _beyond(view, lines))),
        *([Section("parties", "Parties", _parties(view))] if view.parties else []),
    ]


def _parties(view: RunView) -> Html:
    """The statement of each party of a federation, as the folder has it."""
    trust = WATCHERS.get(str(view.terms.get("trust")), "its observer")
    said = []
    for party in view.parties:
        unit, budget = party["unit"], party["budget"]
        spent = f"ε = {shown_epsilon(party['epsilon'])} at δ = {_power(party['delta'])}"
        limit = f", of a budget of {formatting.number(budget)}" if budget is not None else ""
        others = [
            f"for each {name} ε = {shown_epsilon(value)}" for name, value in party["epsilons"].items() if name != unit
        ]
        refusals = ", ".join(f"{why}: {count}" for why, count in party["refusals"].items()) or "none"
        rows = [
            ("Spent", f"{spent}{limit}, for each {unit} of this party, against {trust}"),
            ("The same messages", f"{'; '.join(others)}, which is not what the run promises" if others else ""),
            ("Messages", f"{party['releases']} with noise, {party['without_noise']} without"),
            ("After a loss", f"{party['recovered']} messages were charged again" if party["recovered"] else ""),
            ("Failed", f"{party['failed']} computations, answered with noise alone" if party["failed"] else ""),
            ("Refused", refusals),
        ]
        listed = e("dl", [join(e("dt", name), e("dd", text)) for name, text in rows if text], class_="statement")
        said.append(join(e("h3", party["name"]), listed))
    about = (
        "Each party keeps a ledger of its own, which counts all its runs and every attempt. These are the parties' "
        "statements when the run ended; their ledgers are not checked here."
    )
    return join(e("p", about), *said)


def promised(view: RunView) -> dict[str, Any]:
    """The guarantee in the words of the ledger's statement, or of that in the checkpoint while the run goes on."""
    if view.statement is not None:
        clients = view.summary.get("clients", view.identity.get("clients"))
        statement = view.statement.covering(view.epsilon or 0.0)
        words = {"statement": statement.promise(clients), "not_covered": statement.not_covered()}
        return {**words, **(view.privacy or {}), "statement": words["statement"]}
    if view.privacy is not None:
        return view.privacy
    from ..privacy.statement import Privacy

    try:
        statement = Privacy(**view.identity["privacy"])
        return {"statement": statement.promise(view.identity.get("clients")), "not_covered": statement.not_covered()}
    except (KeyError, TypeError, ValueError, ArithmeticError):  # it is not a statement
        return {}


def ledger_lines(view: RunView) -> tuple[Lines, str | None]:
    """The verified lines of the ledger, or the reason why they cannot be trusted."""
    from ..privacy.hash_chain import LedgerDamaged, read_chain

    path = view.folder / "ledger.jsonl"
    try:
        for part in (path, path.with_name(path.name + ".head")):
            with suppress(FileNotFoundError):
                read_bytes(part, MOST_BYTES, tail=0)  # refuses what the chain would wait for
        lines = read_chain(path).lines
    except FileNotFoundError:
        return [], "There is no ledger in the folder: nothing was released from it, or the file was taken away"
    except RecursionError:
        return [], f"{path} is damaged: it is nested too deeply"
    except (LedgerDamaged, UsageError, OSError, ValueError) as error:
        return [], str(error)
    for number, line in enumerate(lines, 1):
        if line.get("kind") == "release" and not schema.RELEASE(line):
            return [], f"{path}: line {number} is not what a ledger writes"
    return lines, None


def recognised(lines: Lines, false_alarms: float) -> float | None:
    """The largest fraction of units that an observer can recognise at a false positive rate of `false_alarms`.

    Exact for Gaussians that are not sampled: Φ(Φ⁻¹(a) + μ) with μ² = Σ 1/z² over the releases that are charged. None
    where that does not describe the releases.
    """
    releases = [line for line in lines if line.get("kind") == "release"]
    if not releases or any(line["rate"] < 1 for line in releases):
        return None
    mu = math.sqrt(math.fsum(_charged(line) / line["multiplier"] ** 2 for line in releases))
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(false_alarms) + mu)


def with_beyond(lines: Lines, beyond: int) -> Lines:
    """The lines of a ledger and `beyond` releases that are not in it, counted like the one with the least noise."""
    releases = [line for line in lines if line.get("kind") == "release"]
    if not beyond or not releases:
        return lines
    least = min(releases, key=lambda line: float(line["multiplier"]))
    return [*lines, {**least, "count": beyond, "charged": beyond}]


def _charged(line: dict[str, Any]) -> int:
    """How many releases a line charges: fewer than it pays for if groups of clients take turns."""
    charged: int = line.get("charged", line["count"])
    return charged


def _beyond(view: RunView, lines: Lines) -> int:
    """How many messages a party of a federation may have released beyond the ledger."""
    paid = sum(line["count"] for line in lines if line.get("kind") == "release")
    return max(0, view.released - paid) if paid else 0


def _unprotected() -> Html:
    return e(
        "p",
        e("strong", "None. "),
        "The messages left without noise: whoever saw them, the server included, may learn about any client's data"
        " from them. There is no ε to report, and no ledger.",
    )


def _statement(view: RunView, lines: Lines, chart: Html) -> Html:
    terms, spent = view.terms, promised(view)
    stated = _parts(str(spent.get("statement", "")))
    rows: list[tuple[str, Any]] = [
        ("Protected", stated.get("Protected") or f"each {terms.get('unit', 'client')}"),
        ("Against", stated.get("Against") or WATCHERS.get(str(terms.get("trust")), "")),
        ("Strength", _strength(view)),
        (
            "In plain words",
            _plain_words(view, with_beyond(lines, _beyond(view, lines))) if view.distrust is None else "",
        ),
        ("Noise", _noise(view, lines)),
    ]
    gaps = [e("li", formatting.sentence(str(gap))) for gap in spent.get("not_covered", [])]
    notes = [e("li", formatting.sentence(str(note))) for note in spent.get("notes", [])]
    said = e("dl", [join(e("dt", name), e("dd", text)) for name, text in rows if text], class_="statement")
    return join(
        e("div", said, chart, class_="beside"),
        e("div", e("h3", "To be read with it"), e("ul", notes), class_="callout") if notes else None,
        join(e("h3", "What is not covered"), e("ul", gaps, class_="gaps")) if gaps else None,
    )


def _strength(view: RunView) -> str:
    epsilon, delta = view.epsilon, view.terms.get("delta")
    if epsilon is None:
        return ""
    exact = f"ε = {shown_epsilon(epsilon)} at δ = {_power(delta)}"
    if view.budget is None:
        return f"{exact}, for the noise that was used; it was reported afterwards and is not a target"
    left = "all of the budget" if epsilon >= view.budget * (1 - 1e-6) else "within the budget"
    if epsilon > view.budget * (1 + 1e-6):
        left = "above the budget"
    return f"{exact}, {left} of ε = {formatting.number(view.budget)}"


def _plain_words(view: RunView, lines: Lines) -> str:
    unit, terms = view.terms.get("unit", "client"), view.terms
    one, many = recognised(lines, 0.01), recognised(lines, 0.1)
    # A discrete Gaussian is not quite one, and a rule that saw results might have let the run go on.
    inexact = terms.get("noise") == "exact" or (view.privacy or {}).get("stopped_by_rule") is True
    if one is None or many is None or inexact:
        if view.epsilon is None:
            return ""
        if view.epsilon >= 500:
            return f"What is seen may reveal everything about one {unit}: ε is too large to protect anybody."
        factor = formatting.number(float(shown_epsilon(math.exp(view.epsilon), 3)), 3)  # rounded up
        return (
            f"Whatever is seen, the odds that it gives about one {unit} change by a factor of at most {factor}, "
            f"except with a probability of {_power(terms.get('delta'))}."
        )
    if terms.get("relation") == "replace":
        guess, wrong, right = f"which of two data sets one {unit} holds", "who hold the one", "who hold the other"
    else:
        guess, wrong, right = f"whether one {unit} took part", "that did not", "that did"
    return (
        f"Suppose an observer knows everything else and only guesses {guess}. If it may be wrong about 1 % of those "
        f"{wrong}, it is right about at most {_up(one)} of those {right}; if it may be wrong about 10 %, at most "
        f"{_up(many)}. Without seeing anything it would be 1 % and 10 %."
    )


def _noise(view: RunView, lines: Lines) -> str:
    used = [line["sigma"] for line in lines if "sigma" in line]
    sigma = used[0] if used else (view.privacy or {}).get("sigma")
    if sigma is None:
        return ""
    kind = {
        "seeded": "drawn from the seed, or without one from a secret of the run, for simulations only",
        "secure": "drawn from the system's randomness",
        "exact": "discrete, drawn from the system's randomness",
    }.get(str(view.terms.get("noise")), "")
    size = f"σ = {formatting.number(sigma)}"
    if len(set(used)) > 1:  # a schedule
        size = f"σ = {formatting.number(min(used))} to {formatting.number(max(used))}, depending on the round,"
    return f"standard deviation {size} in each coordinate of a client's message, {kind}".rstrip(", ")


def _ledger(lines: Lines, fault: str | None, beyond: int) -> Html:
    releases = [line for line in lines if line.get("kind") == "release"]
    if fault:
        return e("p", e("strong", formatting.sentence(fault)), class_="callout bad")
    last = releases[-1] if releases else {}
    rates = {line["rate"] for line in releases}
    charged = sum(map(_charged, releases))
    turns = f", {charged} of them charged, because clients take turns" if charged < last.get("releases", 0) else ""
    facts = [
        ("Releases paid for", formatting.number(last.get("releases")), f"in {len(releases)} lines{turns}"),
        (
            "ε in the ledger",
            shown_epsilon(last.get("epsilon")),
            f"without the {beyond} messages more that a party may have released"
            if beyond
            else "never below the exact one",
        ),
        ("Noise multiplier", formatting.number(last.get("multiplier")), "σ over sensitivity, as observed"),
        (
            "Sampling",
            formatting.listed([formatting.percent(rate, 2) for rate in sorted(rates)]),
            "of the units per round",
        )
        if rates - {1.0}
        else ("Sampling", "none" if releases else "", "claimed"),
        ("Chain of hashes", "whole", f"{len(lines)} lines checked"),
    ]
    shown, left_out = _shortened(releases)
    rows = [
        [
            _rounds(line),
            formatting.number(line["count"]),
            formatting.number(line["sigma"]),
            formatting.number(line["multiplier"]),
            shown_epsilon(line["epsilon"]),
            formatting.number(line["attempt"]),
            e("code", str(line.get("hash", ""))[:12]),
        ]
        for line in shown
    ]
    columns = ("rounds", ">releases", ">σ per client", ">multiplier", ">ε after", ">attempt", "hash")
    return join(
        e("p", "A line is written, and is on the disk, before its messages leave."),
        cards(facts),
        e(
            "details",
            e(
                "summary",
                f"All lines ({len(releases)})" if not left_out else f"Lines ({len(shown)} of {len(releases)})",
            ),
            table(columns, rows, aria_label="The ledger's lines"),
            e("p", f"{left_out} lines in the middle are left out here; ledger.jsonl has all.") if left_out else None,
        )
        if rows
        else None,
    )


def _shortened(releases: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    if len(releases) <= MOST_LINES:
        return list(releases), 0
    half = MOST_LINES // 2
    return [*releases[:half], *releases[-half:]], len(releases) - 2 * half


def _rounds(line: dict[str, Any]) -> str:
    first, count = line["round"], line["count"]
    return str(first) if count == 1 else f"{first} – {first + count - 1}"


def _parts(statement: str) -> dict[str, str]:
    """ "Protected: who. Against: whom. Strength: how." as its parts."""
    found = {}
    for name, following in (("Protected", " Against:"), ("Against", " Strength:"), ("Strength", "\n")):
        _, sign, rest = statement.partition(f"{name}: ")
        if sign:
            found[name] = rest.split(following)[0].rstrip(". ")
    return found


def _power(delta: Any) -> str:
    if not isinstance(delta, int | float):
        return "δ"
    return formatting.number(float(shown_delta(delta, 4))).replace("-", "\u2011")


def _up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 10:g} %"
