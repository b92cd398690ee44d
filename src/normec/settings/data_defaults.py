"""The defaults that a data set changes: settings of runs on it that differ from those that `RunConfig` declares.

`normec.settings.make` uses them for settings that are not given. A value may depend on the method, on privacy
and on the unit of protection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

# heart-disease at record level. DP-SGD with clipping is the default, because it needs the least noise there: a memory
# adds up what one record did to all messages so far, and only under local trust can it be kept noisy instead. tau clips
# the mean of records that are clipped already, so that 1 clips nothing. The settings have the best mean
# score of local trust and secure sum in a cross-validation on the training patients at ε = 1 (`python -m
# benchmarks.privacy run heart-disease`).
_RECORD_LEVEL: Mapping[str, Settings] = {
    "dpsgd-clip": {"tau": 1.0, "lr": 0.07, "rounds": 30},
    "dpsgd-norm": {"alpha": 1.0, "lr": 0.05, "rounds": 30},
    "normec": {"alpha": 1.0, "beta": 0.3, "decay": 0.1, "server_norm": False, "lr": 0.5, "rounds": 10},
    "clip21": {"tau": 0.3, "lr": 0.2, "rounds": 10},
}


def usual_settings(given: Settings) -> dict[str, Any]:
    """Return the values of settings that are not given, as far as the data set decides them.

    Args:
        given: The settings that are given.

    Example:
        >>> usual_settings({"data": "heart-disease", "private": False})
        {'split': 'centre', 'weights': 'records'}
        >>> usual_settings({"data": "digits"})
        {}
    """
    if given.get("data") != "heart-disease":
        return {}
    usual: dict[str, Any] = {"split": "centre"}
    if given.get("split", "centre") == "centre":
        usual["weights"] = "records"
    if given.get("private", True) and "weights" in usual:
        usual["public_sizes"] = True  # the numbers of patients are published
    if given.get("private", True) and given.get("unit") == "record":
        usual["method"] = "dpsgd-clip"
        usual |= _RECORD_LEVEL.get(given.get("method", "dpsgd-clip"), {})
    return {name: value for name, value in usual.items() if name not in given}
