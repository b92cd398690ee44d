"""The schema of the files of a run. Invalid values are left out, so that they cannot break a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 2**63


def anything(_: Any) -> bool:
    return True


def number(value: Any) -> bool:
    """A number of ordinary size; NaN and infinity are numbers too."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST)


def finite(value: Any) -> bool:
    return number(value) and math.isfinite(value)


def count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def text(value: Any) -> bool:
    return isinstance(value, str)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def scalar(value: Any) -> bool:
    return text(value) or truth(value) or number(value)


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(check(one) for one in value)


def table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(check(one) for one in value.values())


def record(required: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """A table with all keys of `required`, and of `others` any; further keys are not looked at."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and fits(value[name]) for name, fits in required.items())
            and all(fits(value[name]) for name, fits in (others or {}).items() if name in value)
        )

    return check


# The terms of the guarantee, as settings and in a checkpoint.
TERMS: dict[str, Check] = {
    **dict.fromkeys(("epsilon", "sigma"), optional(finite)),
    "delta": finite,
    **dict.fromkeys(("unit", "relation", "trust", "noise", "memory"), optional(text)),
    "replay": optional(text),
}
ROW = table_of(optional(number))
SPENT = record(
    {"epsilon": number},
    {
        "delta": number,
        "sigma": number,
        "is_target": truth,
        "simulation": truth,
        "statement": text,
        "not_covered": list_of(text),
        "notes": list_of(text),
    },
)
SUMMARY: dict[str, Check] = {
    **dict.fromkeys(("status", "engine", "device"), text),
    **dict.fromkeys(("stopped", "error"), optional(text)),
    **dict.fromkeys(("round", "rounds", "clients", "best_accuracy_round"), optional(count)),
    "dimension": count,
    **dict.fromkeys(("best_accuracy", "majority", "smallest_grad_norm", "message_bound"), optional(number)),
    "final": ROW,
    "timings": table_of(finite),
    "privacy": optional(SPENT),
    "config": table_of(optional(either(scalar, table_of(anything)))),
    "versions": table_of(scalar),
}
CHECKPOINT: dict[str, Check] = {"round": count, "timings": table_of(finite), "identity": table_of(anything)}
IDENTITY: dict[str, Check] = {
    "method": text,
    "lr": either(number, text),
    **dict.fromkeys(("rounds", "clients", "dimension"), count),
    "privacy": optional(record({}, TERMS)),
}
SETTINGS: dict[str, Check] = {**TERMS, **dict.fromkeys(("method", "data", "model", "split"), text), "private": truth}
_SPENT_MS = {"name": text, "ms": finite, "device_ms": finite}
PROFILE = record(
    {
        **dict.fromkeys(("first_round", "rounds"), count),
        "ms_per_round": finite,
        "parts": list_of(record(_SPENT_MS)),
        "operations": list_of(record({**_SPENT_MS, "calls": finite})),
    }
)
PARTY = record(
    {
        **dict.fromkeys(("name", "unit", "relation"), text),
        **dict.fromkeys(("releases", "recovered", "without_noise", "failed"), count),
        **dict.fromkeys(("epsilon", "delta"), finite),
        "budget": optional(finite),
        "epsilons": table_of(finite),
        "refusals": table_of(count),
    }
)
RELEASE = record(
    {
        **dict.fromkeys(("round", "count", "attempt", "releases"), count),
        **dict.fromkeys(("sigma", "rate", "epsilon"), finite),
        "multiplier": lambda value: finite(value) and value > 0,
    },
    {"charged": count},
)


def fitting(
    held: Mapping[str, Any], known: Mapping[str, Check], others: Check | None
) -> tuple[dict[str, Any], list[str]]:
    """The valid entries of `held`, and the names of the invalid ones.

    `others` checks names that are not in `known`; with None they are dropped without being reported.
    """
    kept, wrong = {}, []
    for name, value in held.items():
        check = known.get(name, others)
        if check is not None and check(value):
            kept[name] = value
        elif check is not None:
            wrong.append(name)
    return kept, wrong
