"""The method of a configuration: its settings, its usual step size and its usual rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..algorithms import registry
from ..algorithms.catalogue import CATALOGUE, METHODS, ROUNDS, Entry, is_own
from ..algorithms.error_feedback import usual_kept
from ..algorithms.local_steps import LocalSteps
from ..algorithms.method import Method
from ..errors import UsageError, nearest, one_of
from ..settings.assignments import format_assignments, parse_assignments
from ..settings.config import RunConfig, in_groups
from ..settings.data_defaults import plain_step_size
from . import server

OF_METHODS = tuple(name for name in in_groups("method") if name != "method")
SETTINGS = tuple(name for name in OF_METHODS if name != "method_settings")
LOCAL = in_groups("local")
_COUNTS = ("local_steps", "local_epochs")
_LOCAL_DEFAULTS = {"local_optimizer": "sgd", "local_momentum": 0.0, "prox": 0.0, "local_scale": "gradient"}


def applies(method: str, setting: str) -> bool:
    """Whether `method` has a setting, which is one of `OF_METHODS`."""
    return is_own(method) if setting == "method_settings" else setting in settings_of(method)


def settings_of(method: str) -> Sequence[str]:
    """Return the settings that a method has."""
    if is_own(method):
        return tuple(registry.settings_of(registry.find(method)))
    return tuple(entry(method).settings)


def split_name(text: str) -> tuple[str, dict[str, Any]]:
    """Split a method with its settings, as in `compare`: NAME:KEY=VALUE,…

    A comma may replace the colon after FILE.py:CLASS, which contains one itself.
    """
    file, colon, rest = text.partition(".py:")
    if colon:
        kind, *own_parts = re.split("[:,]", rest, maxsplit=1)
        name, own = f"{file}.py:{kind}", "".join(own_parts)
    else:
        name, _, own = text.partition(":")
    return name, parse_assignments(own)


def step_size(config: RunConfig) -> float | Literal["theory"]:
    """The configuration's step size, or the method's own."""
    if config.lr is not None:
        return config.lr
    if is_own(config.method):
        raise UsageError(
            f"lr must be given: {config.method} is not one of normec's methods and has no usual step size; "
            f"add --lr, or compare it as {config.method},lr=0.1"
        )
    plain = plain_step_size(config.record())
    if plain is None:
        plain = entry(config.method).step_size(settings_used(config), config.private)
    optimizer = server.optimizer(config)
    return plain if optimizer is None else optimizer.usual_lr(plain)


def rounds(config: RunConfig) -> int | None:
    """Return the rounds of the configuration, or the method's default; None if epochs are given instead."""
    if config.rounds is not None or config.epochs is not None:
        return config.rounds
    known = CATALOGUE.get(config.method)
    return known.private_rounds if known is not None and config.private else ROUNDS


def build(config: RunConfig, dim: int, sizes: Sequence[int] | None = None) -> Method:
    """Build the method of a configuration, for a model of `dim` parameters in tensors of `sizes` (None: one tensor)."""
    for setting in OF_METHODS:
        if getattr(config, setting) is not None and not applies(config.method, setting):
            has = ", ".join(settings_of(config.method)) or "no settings"
            raise UsageError(f"{setting} does not apply to {config.method}, which has {has}")
    if is_own(config.method):
        return _own(config)
    known = entry(config.method)
    share = _participation(config) if known.takes("participation") else 1.0
    method: Method = known.build(settings_used(config, dim), sizes or (dim,), share)
    return method


def _participation(config: RunConfig) -> float:
    """The share of the clients that take part in a round."""
    if config.groups is not None:
        return (config.sample_rate or 1.0) / config.groups
    if config.sample_rate is not None:
        return config.sample_rate
    if config.sample_count is None:
        return 1.0
    if config.clients is None:
        raise UsageError(
            f"{config.method} needs the number of clients beside sample_count; give clients or sample_rate"
        )
    return config.sample_count / config.clients


def settings_used(config: RunConfig, dim: int | None = None) -> dict[str, Any]:
    """Return the settings of a built-in method with the values that are used, including defaults.

    `dim` is the number of parameters; without it, a default that depends on it is None.
    """
    defaults = entry(config.method).defaults(config.private)
    if "k" in defaults and dim is not None:
        defaults["k"] = usual_kept(dim)
    return {key: value if getattr(config, key) is None else getattr(config, key) for key, value in defaults.items()}


def local_steps(config: RunConfig) -> LocalSteps | None:
    """The local steps of a configuration; None where clients send one gradient."""
    used = local_settings_used(config)
    names = {"prox": "prox"} | {name: name.removeprefix("local_") for name in LOCAL if name != "prox"}
    return LocalSteps(**{names[name]: value for name, value in used.items()}) if used else None


def local_settings_used(config: RunConfig) -> dict[str, Any]:
    """The settings of local steps with the values that are used; empty where clients send one gradient.

    Raises:
        UsageError: A setting is given that does not apply, or the step size is missing.
    """
    given = {name: getattr(config, name) for name in LOCAL if getattr(config, name) is not None}
    known = CATALOGUE.get(config.method)
    usual = known.local_defaults(config.private) if known is not None else {}
    if given.keys() & set(_COUNTS):
        usual = {name: value for name, value in usual.items() if name not in _COUNTS}
    used = {**_LOCAL_DEFAULTS, **usual, **given}
    if not used.keys() & set(_COUNTS):
        if given:
            raise UsageError(f"{next(iter(given))} is for local steps; give local_steps or local_epochs")
        return {}
    if "local_lr" not in used:
        raise UsageError(f"local_lr must be given: {config.method} has no usual step size of local steps")
    return used


def makes_local_steps(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether clients make local steps by these settings."""
    known = CATALOGUE.get(method)
    return any(name in settings for name in _COUNTS) or (known is not None and known.local is not None)


def needs_dimension(config: RunConfig) -> bool:
    """Whether a setting that is not given depends on the number of parameters."""
    return not is_own(config.method) and settings_used(config).get("k", 0) is None


def entry(method: str) -> Entry:
    """The catalogue's entry; raises `UsageError` where there is none."""
    one_of((*METHODS, "FILE.py:CLASS"), method=method)
    return CATALOGUE[method]


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
