"""Where error feedback is ahead of DP-SGD, where behind: by place, by split, and by how much noise there is."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np

from normec.experiments.tables import to_markdown

from .contenders import CONTENDERS
from .studies import STUDIES, Place
from .work import Record

NOT_RUN, NOTHING = "not run", "–"
Places = Mapping[Place, Mapping[str, Record]]  # of every study, split and ε the methods' records
Lead = tuple[float, float]  # in points, and the spread
FORGETS = "NormEC, forgetting"
PAPER = tuple(name for name, one in CONTENDERS.items() if one.remembers and name != FORGETS)
BARE = "DP-SGD, norm"
DIRECT = tuple(name for name, one in CONTENDERS.items() if not one.remembers)
SIDES = {"error feedback as in the paper": PAPER, "NormEC with forgetting": (FORGETS,)}
NOISE = (0.0, 0.05, 0.2, math.inf)  # bounds of the classes that places are put into
LEADS = (
    "Lead over the better DP-SGD in points, of the best method with error feedback as in the paper / of NormEC with "
    "forgetting; bold where it is larger than the spreads of the two (their root sum of squares), from few seeds. The "
    "paper's side is the best of three by test accuracy, DP-SGD's the better of two: the larger side gains by it."
)
COUNTED = (
    "The same by study, by split, and by the noise that no method escapes (below): the median lead, and how often one "
    "is ahead or behind by more than the spreads; in brackets how often that would be by chance, were all methods "
    "equal and their seeds' results normal. Points are of accuracy, on w8a of the area. A place that was run again "
    "with more effort counts once."
)


def lines(places: Places) -> list[str]:
    """By how much error feedback is ahead of methods without, and where."""
    if not places:
        return []
    leads = {title: _leads(places, names) for title, names in SIDES.items()}
    counted = [
        [
            kind,
            str(len(own)),
            *(_counted({place: found[place] for place in own}, title) for title, found in leads.items()),
        ]
        for kind, own in _kinds(once(places)).items()
    ]
    return [
        LEADS,
        "",
        *by_place(places, lambda place: " / ".join(_points(own[place]) for own in leads.values())),
        "",
        COUNTED,
        "",
        *to_markdown(("where", "places", *leads), counted),
    ]


def by_place(places: Places, shown: Callable[[Place], str]) -> list[str]:
    """A table with a row for each study and split, and a column for each ε."""
    across = sorted({place.epsilon for place in places})
    rows = []
    for study, split in dict.fromkeys((place.study, place.split) for place in places):
        own = [Place(study, "", epsilon, split) for epsilon in across]
        rows.append([f"{study}, {split}", *(shown(place) if place in places else missing(place) for place in own)])
    return to_markdown(("study, split", *targets(across)), rows)


def missing(place: Place) -> str:
    """In place of a result: a dash where the study asks for none."""
    return NOT_RUN if place.epsilon in STUDIES[place.study].epsilons else NOTHING


def once(places: Places) -> Places:
    """Places less those that were run again with more effort."""
    again = {Place(STUDIES[one.study].instead, "", one.epsilon, one.split) for one in places}
    return {place: methods for place, methods in places.items() if place not in again}


def _kinds(places: Places) -> dict[str, list[Place]]:
    """Places that have a study, a split, or a class of noise in common."""
    found = {study: [one for one in places if one.study == study] for study in {one.study: 0 for one in places}}
    found |= {f"split {split}": [one for one in places if one.split == split] for split in splits_of(places)}
    for low, high in itertools.pairwise(NOISE):
        title = f"noise from {low:g} to {high:g}" if high < math.inf else f"noise {low:g} and more"
        own = [one for one, methods in places.items() if low <= (floor(methods[BARE]) or math.nan) < high]
        found |= {title: own} if own else {}
    return found


def splits_of(places: Iterable[Place]) -> list[str]:
    return list(dict.fromkeys(place.split for place in places))


def _leads(places: Places, names: Iterable[str]) -> dict[Place, Lead]:
    """The best of these methods less the better DP-SGD, and what the seeds' spreads make of that."""
    found = {}
    for place, methods in places.items():
        one, other = _best(methods, names), _best(methods, DIRECT)
        spread = (one["spread"] ** 2 + other["spread"] ** 2) ** 0.5
        found[place] = (100 * (one["accuracy"] - other["accuracy"]), 100 * spread)
    return found


def _points(lead: Lead) -> str:
    """In bold where it is larger than the spreads."""
    return f"**{lead[0]:+.1f}**" if abs(lead[0]) > lead[1] else f"{lead[0]:+.1f}"


def _counted(leads: Mapping[Place, Lead], side: str) -> str:
    ahead = sum(lead > spread for lead, spread in leads.values())
    behind = sum(lead < -spread for lead, spread in leads.values())
    rates = [chance(len(SIDES[side]), len(STUDIES[place.study].effort.test_seeds)) for place in leads]
    by_chance = [sum(rate[way] for rate in rates) for way in (0, 1)]
    middle = statistics.median(lead for lead, _ in leads.values())
    return f"{middle:+.1f}; ahead {ahead} ({by_chance[0]:.1f}), behind {behind} ({by_chance[1]:.1f})"


@cache
def chance(methods: int, seeds: int, draws: int = 20000) -> tuple[float, float]:
    """How often the best of so many equal methods seems ahead of the better of DP-SGD's, and how often behind."""
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
    """√d / (μ n), from a run of DP-SGD with normalisation: a round's noise over √T."""
    return record["noise"] / record["chosen"]["rounds"] ** 0.5 if "noise" in record else None


def targets(epsilons: Iterable[float]) -> list[str]:
    return [f"ε = {epsilon:g}" for epsilon in epsilons]
