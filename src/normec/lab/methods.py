"""Methods by name, each with the settings it has and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, one_of
from ..methods import DPSGD, EF21, GD, Clip21, Method, NormEC
from ..operators import Clip, RandK, SmoothedNorm, TopK
from .config import RunConfig

# alpha is the paper's choice after its first experiment, beta its best value; the others follow.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "normec": {"alpha": 0.01, "beta": 0.1, "server_norm": True, "decay": 0.0},
    "clip21": {"tau": 0.1, "decay": 0.0},
    "ef21": {"compressor": "topk", "k": None},
    "dpsgd-norm": {"alpha": 0.01, "beta": 1.0},
    "dpsgd-clip": {"tau": 0.1, "beta": 1.0},
    "gd": {},
}
METHODS = tuple(DEFAULTS)
SETTINGS = tuple(dict.fromkeys(key for settings in DEFAULTS.values() for key in settings))


def applies(method: str, setting: str) -> bool:
    """Whether a method's setting (one of `SETTINGS`) means anything to `method`."""
    one_of(METHODS, method=method)
    return setting in DEFAULTS[method]


def build(config: RunConfig, dim: int) -> Method:
    """The method of a configuration, for a model of `dim` parameters."""
    for setting in SETTINGS:
        if getattr(config, setting) is not None and not applies(config.method, setting):
            has = ", ".join(DEFAULTS[config.method]) or "no settings"
            raise UsageError(f"{setting} does not apply to {config.method}, which has {has}")
    one_of(METHODS, method=config.method)
    own: dict[str, Any] = {
        key: value if getattr(config, key) is None else getattr(config, key)
        for key, value in DEFAULTS[config.method].items()
    }
    match config.method:
        case "normec":
            return NormEC(**own)
        case "clip21":
            return Clip21(**own)
        case "ef21":
            kept = own["k"] if own["k"] is not None else max(1, dim // 10)
            return EF21(TopK(kept) if own["compressor"] == "topk" else RandK(kept))
        case "dpsgd-norm":
            return DPSGD(SmoothedNorm(own["alpha"]), own["beta"])
        case "dpsgd-clip":
            return DPSGD(Clip(own["tau"]), own["beta"])
    return GD()
