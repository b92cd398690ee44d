"""The defaults that depend on other settings: on the data set, and on the unit of protection.

`normec.settings.make` uses them for settings that are not given, instead of those that `RunConfig` declares, and
`normec.train` for a method that is given by name.

At record level DP-SGD with clipping is the default, because it needs the least noise there: a memory adds up what one
record did to all messages so far, and only under local trust can it be kept noisy instead. If every record's gradient
is normalised, as it is by default, tau = 1 clips nothing more, and lr fits directions of norm one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms.catalogue import FOR_RECORDS

Settings = Mapping[str, Any]

# heart-disease at record level: the settings with the best mean score of local trust and secure sum in a
# cross-validation on the training patients at ε = 1 (`python -m benchmarks.privacy run heart-disease`).
_HEART_DISEASE: Mapping[str, Settings] = {
    "dpsgd-clip": {"tau": 1.0, "lr": 0.07, "rounds": 30},
    "dpsgd-norm": {"alpha": 1.0, "lr": 0.05, "rounds": 30},
    "normec": {"alpha": 1.0, "beta": 0.3, "decay": 0.1, "server_norm": False, "lr": 0.5, "rounds": 10},
    "clip21": {"tau": 0.3, "lr": 0.2, "rounds": 10},
}

_WITHOUT_RECORD_CLIP = ("local_steps", "local_epochs")  # settings with which records are not clipped


def usual_settings(given: Settings) -> dict[str, Any]:
    """Return the values of settings that are not given, as far as the data set or the unit decides them.

    Args:
        given: The settings that are given.

    Example:
        >>> usual_settings({"data": "digits"})
        {}
        >>> usual_settings({"data": "digits", "unit": "record"})
        {'method': 'dpsgd-clip', 'tau': 1.0, 'lr': 2.0}
        >>> usual_settings({"data": "digits", "unit": "record", "method": "dpsgd-norm", "lr": 0.5})
        {'alpha': 3.0, 'rounds': 50}
    """
    of_data = settings_of_data(given)
    if of_data or not _protects_records(given):
        return of_data
    return _not_given({"method": "dpsgd-clip", **_of_method(given)}, given)


def settings_of_data(given: Settings) -> dict[str, Any]:
    """Return the values of settings that are not given, as far as the data set decides them.

    Args:
        given: The settings that are given.

    Example:
        >>> settings_of_data({"data": "heart-disease", "private": False})
        {'split': 'centre', 'weights': 'records'}
    """
    if given.get("data") != "heart-disease":
        return {}
    usual: dict[str, Any] = {"split": "centre"}
    if given.get("split", "centre") == "centre":
        usual["weights"] = "records"
    if given.get("private", True) and "weights" in usual:
        usual["public_sizes"] = True  # the numbers of patients are published
    if _protects_records(given):
        usual |= {"method": "dpsgd-clip", **_of_method(given)}
    return _not_given(usual, given)


def plain_step_size(given: Settings) -> float | None:
    """Return the usual step size without a server optimizer, as far as the data set or the unit decides it.

    Args:
        given: The settings that are given.

    Example:
        >>> plain_step_size({"unit": "record", "server_optimizer": "momentum"})
        2.0
    """
    if not _protects_records(given):
        return None
    size: float | None = _of_method({**given, "server_optimizer": None}).get("lr")
    return size


def _of_method(given: Settings) -> dict[str, Any]:
    """The method's settings for protected records; none if no rule covers it or records are not clipped at one.

    A server optimizer has a step size of its own, and so have normalised steps. Momentum p makes it 1 − p times as
    long.
    """
    name = str(given.get("method", "dpsgd-clip"))
    usual = dict((_HEART_DISEASE if given.get("data") == "heart-disease" else FOR_RECORDS).get(name, {}))
    clipped = given.get("record_clip", "auto") == "auto" and all(
        given.get(name) is None for name in _WITHOUT_RECORD_CLIP
    )
    if given.get("data") != "heart-disease" and not clipped:
        return {}
    if given.get("epochs") is not None:
        usual.pop("rounds", None)
    momentum = given.get("momentum")
    if given.get("server_optimizer") is not None or given.get("server_norm"):
        usual.pop("lr", None)
    elif isinstance(momentum, float) and 0 < momentum < 1 and "lr" in usual:
        usual["lr"] *= 1 - momentum
    return usual


def _not_given(usual: Settings, given: Settings) -> dict[str, Any]:
    return {name: value for name, value in usual.items() if name not in given}


def _protects_records(given: Settings) -> bool:
    return bool(given.get("private", True)) and given.get("unit") == "record"
