"""The built-in methods with their settings and defaults, and the methods of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..algorithms import registry
from ..algorithms.direct import DPSGD, GD
from ..algorithms.error_feedback import EF21, Clip21, NormEC
from ..algorithms.method import Method
from ..algorithms.operators import Clip, RandK, SmoothedNorm, TopK
from ..algorithms.tensor_norm import TensorNormEC
from ..errors import UsageError, nearest, one_of
from ..settings.config import RunConfig, format_assignments, in_groups, is_own, parse_assignments

# alpha is the paper's choice after its first experiment, and beta its best value.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "normec": {"alpha": 0.01, "beta": 0.1, "server_norm": True, "decay": 0.0},
    "clip21": {"tau": 0.1, "decay": 0.0},
    "ef21": {"compressor": "topk", "k": None},
    "dpsgd-norm": {"alpha": 0.01, "beta": 1.0, "momentum": 0.0},
    "dpsgd-clip": {"tau": 0.1, "beta": 1.0, "momentum": 0.0},
    "gd": {},
}
# Different defaults of private runs. The memory forgets, so that the noise in ĝ does not accumulate. These settings and
# the step sizes and rounds below were the best on validation data at ε = 8, IID, out of 16 trials each, rounded
# (`python -m benchmarks.privacy table`).
PRIVATE: Mapping[str, Mapping[str, Any]] = {
    "normec": {"beta": 0.011, "decay": 0.05},
    "clip21": {"tau": 0.03},
    "dpsgd-clip": {"tau": 0.47},
}
PRIVATE_ROUNDS: Mapping[str, int] = {"normec": 200, "clip21": 50, "dpsgd-norm": 50, "dpsgd-clip": 200}
ROUNDS = 300
METHODS = tuple(DEFAULTS)
# Without noise: step sizes for the digits, about 1/L for methods that follow the gradient.
STEP_SIZES: Mapping[str, float] = {
    "normec": 0.05,
    "normec, no server norm": 1.0,
    "clip21": 1.0,
    "ef21": 1.0,
    "dpsgd-norm": 0.2,
    "dpsgd-clip": 1.0,
    "gd": 1.0,
}
PRIVATE_STEP_SIZES: Mapping[str, float] = {
    "normec": 0.09,
    "normec, no server norm": 1.5,
    "clip21": 0.3,
    "dpsgd-norm": 0.73,
    "dpsgd-clip": 0.5,
}
PRIVATE_STEP_NAMES = tuple(name for name in METHODS if name in PRIVATE_STEP_SIZES)  # the methods with a bound
SETTINGS = tuple(name for name in in_groups("method") if name not in ("method", "method_settings"))


def applies(method: str, setting: str) -> bool:
    """Whether `method` has a setting, which is one of `SETTINGS`."""
    return setting in settings_of(method)


def settings_of(method: str) -> Sequence[str]:
    """Return the settings that a method has."""
    if is_own(method):
        return tuple(registry.settings_of(registry.find(method)))
    one_of(METHODS, method=method)
    return tuple(DEFAULTS[method])


def split_name(text: str) -> tuple[str, dict[str, Any]]:
    """Split a method with its settings, as in `compare`: NAME:KEY=VALUE,… or FILE.py:CLASS,KEY=VALUE,…"""
    file, colon, rest = text.partition(".py:")
    if colon:
        kind, _, own = rest.partition(",")
        name = f"{file}.py:{kind}"
    else:
        name, _, own = text.partition(":")
    return name, parse_assignments(own)


def step_size(config: RunConfig) -> float | Literal["theory"]:
    """Return the step size of the configuration, or the method's default, times 1 − p with momentum p."""
    if config.lr is not None:
        return config.lr
    if is_own(config.method):
        raise UsageError(
            f"lr must be given: {config.method} is not one of normec's methods and has no default step size"
        )
    one_of(METHODS, method=config.method)
    name = "normec, no server norm" if config.server_norm is False else config.method
    size = (PRIVATE_STEP_SIZES if config.private else STEP_SIZES).get(name, STEP_SIZES[name])
    return size * (1 - (config.momentum or 0.0))


def rounds(config: RunConfig) -> int | None:
    """Return the rounds of the configuration, or the method's default; None if epochs are given instead."""
    if config.rounds is not None or config.epochs is not None:
        return config.rounds
    return PRIVATE_ROUNDS.get(config.method, ROUNDS) if config.private else ROUNDS


def build(config: RunConfig, dim: int, sizes: Sequence[int] | None = None) -> Method:
    """Build the method of a configuration, for a model of `dim` parameters in tensors of `sizes` (None: one tensor)."""
    for setting in SETTINGS:
        if getattr(config, setting) is not None and not applies(config.method, setting):
            has = ", ".join(settings_of(config.method)) or "no settings"
            raise UsageError(f"{setting} does not apply to {config.method}, which has {has}")
    if is_own(config.method):
        return _own(config)
    own = settings_used(config, dim)
    match config.method:
        case "normec":
            way = own.pop("server_norm")
            if isinstance(way, str):
                return TensorNormEC(**own, sizes=tuple(sizes or (dim,)), in_place=way == "in-place")
            return NormEC(**own, server_norm=way)
        case "clip21":
            return Clip21(**own)
        case "ef21":
            return EF21((TopK if own["compressor"] == "topk" else RandK)(own["k"]))
        case "dpsgd-norm":
            return DPSGD(SmoothedNorm(own["alpha"]), own["beta"], own["momentum"])
        case "dpsgd-clip":
            return DPSGD(Clip(own["tau"]), own["beta"], own["momentum"])
    return GD()


def settings_used(config: RunConfig, dim: int | None = None) -> dict[str, Any]:
    """Return the settings of a built-in method with the values that are used, including defaults.

    `dim` is the number of parameters; without it, a default that depends on it is None.
    """
    one_of(METHODS, method=config.method)
    defaults = {**DEFAULTS[config.method], **(PRIVATE.get(config.method, {}) if config.private else {})}
    if "k" in defaults and dim is not None:
        defaults["k"] = max(1, dim // 10)
    return {key: value if getattr(config, key) is None else getattr(config, key) for key, value in defaults.items()}


def own_settings_given(config: RunConfig) -> dict[str, Any]:
    """Return the given settings of a user's own method, under its own names or those in `SETTINGS`."""
    shared = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) is not None}
    return shared | parse_assignments(config.method_settings or "")


def own_settings_used(config: RunConfig) -> str | None:
    """Return the settings of a user's own method with the defaults of its class, as text for `method_settings`."""
    declared = registry.settings_of(registry.find(config.method))
    defaults = {name: one.default for name, one in declared.items() if one.default is not one.empty}
    used = {**defaults, **own_settings_given(config)}
    return format_assignments({name: value for name, value in used.items() if _is_plain(value)}) or None


def _is_plain(value: Any) -> bool:
    """Whether KEY=VALUE,… can represent a value."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int) or (isinstance(value, str) and "," not in value)


def _own(config: RunConfig) -> Method:
    """Build a user's own method, or one of another package."""
    given = own_settings_given(config)
    known = settings_of(config.method)
    for name in given:
        if name not in known:
            raise UsageError(
                f"{config.method} has no setting {name!r}{nearest(name, known)}; it has {', '.join(known) or 'none'}"
            )
    return registry.build(config.method, given)
