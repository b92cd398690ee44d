"""Where error feedback leads DP-SGD: by condition, by study, by split, and by the amount of noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np

from normec.experiments.export import to_markdown

from .records import Record
from .search_space import SEARCH_SPACES
from .studies import STUDIES, Condition

NOT_RUN, NOTHING = "not run", "–"
Conditions = Mapping[Condition, Mapping[str, Record]]  # the records of all methods, by condition
Lead = tuple[float, float]  # the lead in points, and its spread
FORGETS = "NormEC, forgetting"
PAPER = tuple(name for name, one in SEARCH_SPACES.items() if one.error_feedback and name != FORGETS)
BARE = "DP-SGD, norm"
DIRECT = tuple(name for name, one in SEARCH_SPACES.items() if not one.error_feedback)
SIDES = {"error feedback as in the paper": PAPER, "NormEC with forgetting": (FORGETS,)}
NOISE = (0.0, 0.05, 0.2, math.inf)  # bounds of the classes of noise
LEADS = (
    "The lead over the better DP-SGD in points, of the best method with error feedback as in the paper / of NormEC "
    "with forgetting. A lead is bold if it is larger than the spreads of the two methods (their root sum of squares), "
    "which come from few seeds. The best of three methods by test accuracy stands for the paper, and the better of two "
    "for DP-SGD: the larger group has an advantage."
)
COUNTED = (
    "The same by study, by split, and by the amount of noise (see below): the median lead, and how often a lead or a "
    "deficit is larger than the spreads. The numbers in brackets are the expected counts if all methods were equal and "
    "the results of their seeds normally distributed. Points are points of accuracy, on w8a of area. Conditions that "
    "were run again with a larger tuning budget are counted once."
)


def lines(conditions: Conditions) -> list[str]:
    """The section on the leads of error feedback."""
    if not conditions:
        return []
    leads = {title: _leads(conditions, names) for title, names in SIDES.items()}
    counted = [
        [
            kind,
            str(len(own)),
            *(_counted({condition: found[condition] for condition in own}, title) for title, found in leads.items()),
        ]
        for kind, own in _kinds(without_repeats(conditions)).items()
    ]
    return [
        LEADS,
        "",
        *by_condition(conditions, lambda condition: " / ".join(_points(own[condition]) for own in leads.values())),
        "",
        COUNTED,
        "",
        *to_markdown(("where", "conditions", *leads), counted),
    ]


def by_condition(conditions: Conditions, shown: Callable[[Condition], str]) -> list[str]:
    """A table with a row for each study and split, and a column for each ε."""
    across = sorted({condition.epsilon for condition in conditions})
    rows = []
    for study, split in dict.fromkeys((condition.study, condition.split) for condition in conditions):
        own = [Condition(study, epsilon, split) for epsilon in across]
        rows.append(
            [
                f"{study}, {split}",
                *(shown(condition) if condition in conditions else missing(condition) for condition in own),
            ]
        )
    return to_markdown(("study, split", *targets(across)), rows)


def missing(condition: Condition) -> str:
    """The text for a missing result: a dash if the condition is not part of the study."""
    return NOT_RUN if condition.epsilon in STUDIES[condition.study].epsilons else NOTHING


def without_repeats(conditions: Conditions) -> Conditions:
    """Conditions without those that were run again with a larger tuning budget."""
    repeated = {Condition(STUDIES[one.study].repeats, one.epsilon, one.split) for one in conditions}
    return {condition: methods for condition, methods in conditions.items() if condition not in repeated}


def _kinds(conditions: Conditions) -> dict[str, list[Condition]]:
    """Conditions grouped by study, by split and by class of noise."""
    found = {study: [one for one in conditions if one.study == study] for study in {one.study: 0 for one in conditions}}
    found |= {f"split {split}": [one for one in conditions if one.split == split] for split in splits_of(conditions)}
    for low, high in itertools.pairwise(NOISE):
        title = f"noise from {low:g} to {high:g}" if high < math.inf else f"noise {low:g} and more"
        own = [one for one, methods in conditions.items() if low <= (floor(methods[BARE]) or math.nan) < high]
        found |= {title: own} if own else {}
    return found


def splits_of(conditions: Iterable[Condition]) -> list[str]:
    return list(dict.fromkeys(condition.split for condition in conditions))


def _leads(conditions: Conditions, names: Iterable[str]) -> dict[Condition, Lead]:
    """The lead of the best of these methods over the better DP-SGD, and the spread of the lead."""
    found = {}
    for condition, methods in conditions.items():
        one, other = _best(methods, names), _best(methods, DIRECT)
        spread = (one["spread"] ** 2 + other["spread"] ** 2) ** 0.5
        found[condition] = (100 * (one["accuracy"] - other["accuracy"]), 100 * spread)
    return found


def _points(lead: Lead) -> str:
    """A lead in points, in bold if it is larger than the spreads."""
    return f"**{lead[0]:+.1f}**" if abs(lead[0]) > lead[1] else f"{lead[0]:+.1f}"


def _counted(leads: Mapping[Condition, Lead], side: str) -> str:
    ahead = sum(lead > spread for lead, spread in leads.values())
    behind = sum(lead < -spread for lead, spread in leads.values())
    rates = [chance(len(SIDES[side]), len(STUDIES[condition.study].budget.test_seeds)) for condition in leads]
    by_chance = [sum(rate[way] for rate in rates) for way in (0, 1)]
    middle = statistics.median(lead for lead, _ in leads.values())
    return f"{middle:+.1f}; ahead {ahead} ({by_chance[0]:.1f}), behind {behind} ({by_chance[1]:.1f})"


@cache
def chance(methods: int, seeds: int, draws: int = 20000) -> tuple[float, float]:
    """How often the best of several equal methods seems to lead the better DP-SGD, and how often to trail it."""
    values = np.random.default_rng(0).standard_normal((draws, methods + len(DIRECT), seeds))
    means, spreads = values.mean(2), values.std(2, ddof=1)
    own, other = means[:, :methods].argmax(1), methods + means[:, methods:].argmax(1)
    every = np.arange(draws)
    lead = means[every, own] - means[every, other]
    spread = np.hypot(spreads[every, own], spreads[every, other])
    return float((lead > spread).mean()), float((lead < -spread).mean())


def _best(methods: Mapping[str, Record], names: Iterable[str]) -> Record:
    return max((methods[name] for name in names), key=lambda one: float(one["accuracy"]))


def floor(record: Record) -> float | None:
    """√d / (μ n), computed from the noise per round of a run of DP-SGD with normalisation."""
    return record["noise"] / record["chosen"]["rounds"] ** 0.5 if "noise" in record else None


def targets(epsilons: Iterable[float]) -> list[str]:
    return [f"ε = {epsilon:g}" for epsilon in epsilons]
