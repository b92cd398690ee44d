"""Why one wins: the noise that no method escapes, what the estimates were made of, how far the gradient turned."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from normec.experiments.tables import to_markdown

from .contenders import CONTENDERS
from .leads import BARE, NOTHING, Places, floor, missing, once, splits_of, targets
from .studies import Place
from .work import Record

FLOOR = (
    "Without SN a run moves x by γ times the sum of its directions. With T rounds at a given ε the noise in their mean "
    "has norm √d/(μn), whatever T, beside a mean of length at most 1 (in units of the largest message; μ is the "
    "guarantee as Gaussian DP, d the dimension, n the clients). With error feedback the same noise stays in ĝ for all "
    "later rounds: the sum of the directions then holds 2/√3 = 1.15 times as much beside the longest that it can be, "
    "and more once the memories have arrived at the gradients, for then the signal stops growing and the noise does "
    "not; forgetting bounds it. So error feedback has to gain elsewhere more than it pays here: by repairing a bias, "
    "or because ĝ moves by a bounded amount a round and so turns less from step to step. The noise by study:",
)
MADE_OF = (
    "At the end of the test runs of the chosen settings, medians over the places above. `noise / ∇f`: the norm of the "
    "noise in ĝ beside the true gradient's; with error feedback it is all that has been gathered and stays, without it "
    "is one round's and new each time, so the two kinds are not to be compared. `memory error / ∇f`: how far the "
    "clients' memories are from their gradients, on average, beside the same. `cosine`: of ĝ, with its noise, and the "
    "gradient after its step.",
)
TURNS = (
    "The cosine of the true gradients before the last step and after, medians over ε. Far below zero the gradient "
    "points back after a step: x swings to and fro across a valley. Records of the other studies are older and without "
    "it.",
)


def lines(places: Places) -> list[str]:
    """The noise that no method escapes, and what ĝ was made of at the end of the chosen runs."""
    if not places:
        return ["Not run."]
    rows, counted = [], once(places)
    for name in CONTENDERS:
        for split in splits_of(counted):
            own = [methods[name] for place, methods in counted.items() if place.split == split]
            ended = [one for one in own if one.get("gradient")]
            rows += [[name, split, *_anatomy(ended)]] if ended else []
    header = ("method", "split", "noise / ∇f", "memory error / ∇f", "cosine", "β or τ", "rounds")
    return [*FLOOR, "", *_floors(places), "", *MADE_OF, "", *to_markdown(header, rows), "", *TURNS, "", *_turns(places)]


def _floors(places: Places) -> list[str]:
    """√d / (μ n) of each study and ε, read off the runs of DP-SGD with normalisation: a round's noise over √T."""
    across = sorted({place.epsilon for place in places})
    rows = []
    for study in dict.fromkeys(place.study for place in places):
        noise = {place.epsilon: floor(methods[BARE]) for place, methods in places.items() if place.study == study}
        told = {e: f"{one:.2g}" for e, one in noise.items() if one is not None}
        rows.append([study, *(told.get(e) or missing(Place(study, "", e, "")) for e in across)])
    return to_markdown(("study", *targets(across)), rows)


def _anatomy(ended: Sequence[Record]) -> list[str]:
    chosen = [one["chosen"] for one in ended]
    return [
        _middle(one["noise"] / one["gradient"] for one in ended),
        _middle(one["memory_error"] / one["gradient"] for one in ended if "memory_error" in one),
        _middle(one["cosine"] for one in ended),
        _middle(one.get("beta", one.get("tau")) for one in chosen),
        _middle(one["rounds"] for one in chosen),
    ]


def _turns(places: Places) -> list[str]:
    """The turn of each method in each study and split of which it is known."""
    rows = []
    for study, split in dict.fromkeys((place.study, place.split) for place in places):
        own = [methods for place, methods in places.items() if (place.study, place.split) == (study, split)]
        told = [_middle(methods[name].get("turn") for methods in own) for name in CONTENDERS]
        rows += [[f"{study}, {split}", *told]] if set(told) != {NOTHING} else []
    return to_markdown(("study, split", *CONTENDERS), rows) if rows else ["No record has it."]


def _middle(values: Iterable[Any]) -> str:
    known = [float(value) for value in values if value is not None]
    return f"{statistics.median(known):.3g}" if known else NOTHING
