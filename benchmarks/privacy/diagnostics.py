"""Explanations: the lower bound of the noise, the content of the estimates, and the turns of the gradient."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from normec.experiments.export import to_markdown

from .leads import BARE, NOTHING, Conditions, floor, missing, splits_of, targets, without_repeats
from .records import Record
from .search_space import SEARCH_SPACES
from .studies import Condition

FLOOR = (
    "Without SN a run moves x by γ times the sum of its directions. After T rounds at a given ε the noise in the mean "
    "of the directions has norm √d/(μn) for every T, while the mean itself has at most norm 1 (in units of the largest "
    "message; μ is the guarantee as Gaussian DP, d the dimension, n the number of clients). With error feedback the "
    "same noise stays in ĝ for all later rounds: relative to its largest possible norm, the sum of the directions has "
    "2/√3 = 1.15 times as much noise, and more once the memories have reached the gradients, because the signal then "
    "stops growing and the noise does not; forgetting bounds it. So error feedback has to gain more elsewhere than it "
    "loses here: by repairing a bias, or because ĝ changes by a bounded amount per round and therefore turns less from "
    "step to step. The noise by study:",
)
CONTENT = (
    "Medians over the conditions above, at the end of the test runs with the chosen settings. `noise / ∇f` is the norm "
    "of the noise in ĝ relative to that of the true gradient. With error feedback this is the noise of all rounds; "
    "without, it is that of one round, independent in each round, so the two kinds of methods cannot be compared. "
    "`memory error / ∇f` is the mean distance of the clients' memories from their gradients, relative to the same "
    "norm. `cosine` is the cosine of ĝ, with its noise, and the gradient after the step.",
)
TURNS = (
    "The cosine of the true gradients before and after the last step, as medians over ε. If it is far below zero, the "
    "gradient points back after a step: x oscillates across a valley. Older records of the other studies do not have "
    "it.",
)


def lines(conditions: Conditions) -> list[str]:
    """The section on the noise, the content of ĝ at the end of the chosen runs, and the turns."""
    if not conditions:
        return ["Not run."]
    rows, counted = [], without_repeats(conditions)
    for name in SEARCH_SPACES:
        for split in splits_of(counted):
            own = [methods[name] for condition, methods in counted.items() if condition.split == split]
            ended = [one for one in own if one.get("gradient")]
            rows += [[name, split, *_content(ended)]] if ended else []
    header = ("method", "split", "noise / ∇f", "memory error / ∇f", "cosine", "β or τ", "rounds")
    return [
        *FLOOR,
        "",
        *_floors(conditions),
        "",
        *CONTENT,
        "",
        *to_markdown(header, rows),
        "",
        *TURNS,
        "",
        *_turns(conditions),
    ]


def _floors(conditions: Conditions) -> list[str]:
    """√d / (μ n) of each study and ε, computed from the runs of DP-SGD with normalisation."""
    across = sorted({condition.epsilon for condition in conditions})
    rows = []
    for study in dict.fromkeys(condition.study for condition in conditions):
        noise = {
            condition.epsilon: floor(methods[BARE])
            for condition, methods in conditions.items()
            if condition.study == study
        }
        shown = {e: f"{one:.2g}" for e, one in noise.items() if one is not None}
        rows.append([study, *(shown.get(e) or missing(Condition(study, e, "")) for e in across)])
    return to_markdown(("study", *targets(across)), rows)


def _content(ended: Sequence[Record]) -> list[str]:
    chosen = [one["chosen"] for one in ended]
    return [
        _median(one["noise"] / one["gradient"] for one in ended),
        _median(one["memory_error"] / one["gradient"] for one in ended if "memory_error" in one),
        _median(one["cosine"] for one in ended),
        _median(one.get("beta", one.get("tau")) for one in chosen),
        _median(one["rounds"] for one in chosen),
    ]


def _turns(conditions: Conditions) -> list[str]:
    """The turn of each method, for the studies and splits whose records have it."""
    rows = []
    for study, split in dict.fromkeys((condition.study, condition.split) for condition in conditions):
        own = [
            methods for condition, methods in conditions.items() if (condition.study, condition.split) == (study, split)
        ]
        shown = [_median(methods[name].get("turn") for methods in own) for name in SEARCH_SPACES]
        rows += [[f"{study}, {split}", *shown]] if set(shown) != {NOTHING} else []
    return to_markdown(("study, split", *SEARCH_SPACES), rows) if rows else ["No record has it."]


def _median(values: Iterable[Any]) -> str:
    known = [float(value) for value in values if value is not None]
    return f"{statistics.median(known):.3g}" if known else NOTHING
