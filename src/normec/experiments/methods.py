"""The method of a configuration: its settings, its usual step size and its usual rounds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal

from ..algorithms import registry
from ..algorithms.catalogue import CATALOGUE, METHODS, ROUNDS, Entry
from ..algorithms.error_feedback import usual_kept
from ..algorithms.method import Method
from ..errors import UsageError, nearest, one_of
from ..settings.config import RunConfig, format_assignments, in_groups, is_own, parse_assignments
from . import server

SETTINGS = tuple(name for name in in_groups("method") if name not in ("method", "method_settings"))


def applies(method: str, setting: str) -> bool:
    """Whether a method's setting (one of `SETTINGS`) means anything to `method`."""
    return setting in settings_of(method)


def settings_of(method: str) -> Sequence[str]:
    """The settings that a method has."""
    if is_own(method):
        return tuple(registry.settings_of(registry.find(method)))
    return tuple(entry(method).settings)


def split_name(text: str) -> tuple[str, dict[str, Any]]:
    """A method with its settings, as `compare` takes it: NAME:KEY=VALUE,… or FILE.py:CLASS,KEY=VALUE,…"""
    file, colon, rest = text.partition(".py:")
    if colon:
        kind, _, own = rest.partition(",")
        name = f"{file}.py:{kind}"
    else:
        name, _, own = text.partition(":")
    return name, parse_assignments(own)


def step_size(config: RunConfig) -> float | Literal["theory"]:
    """The configuration's step size, or the method's own."""
    if config.lr is not None:
        return config.lr
    if is_own(config.method):
        raise UsageError(f"lr must be given: {config.method} is not one of normec's methods and has no usual step size")
    plain = entry(config.method).step_size(settings_used(config), config.private)
    optimizer = server.optimizer(config)
    return plain if optimizer is None else optimizer.usual_lr(plain)


def rounds(config: RunConfig) -> int | None:
    """The configuration's rounds, or the method's own; None where epochs are given instead."""
    if config.rounds is not None or config.epochs is not None:
        return config.rounds
    known = CATALOGUE.get(config.method)
    return known.private_rounds if known is not None and config.private else ROUNDS


def build(config: RunConfig, dim: int, sizes: Sequence[int] | None = None) -> Method:
    """The method of a configuration, for a model of `dim` parameters in tensors of `sizes` (None: one)."""
    for setting in SETTINGS:
        if getattr(config, setting) is not None and not applies(config.method, setting):
            has = ", ".join(settings_of(config.method)) or "no settings"
            raise UsageError(f"{setting} does not apply to {config.method}, which has {has}")
    if is_own(config.method):
        return _own(config)
    make, own = entry(config.method).make(), settings_used(config, dim)
    if "sizes" in inspect.signature(make).parameters:
        own["sizes"] = tuple(sizes or (dim,))
    method: Method = make(**own)
    return method


def settings_used(config: RunConfig, dim: int | None = None) -> dict[str, Any]:
    """The settings of one of this package's methods with the values that are used, its own where none are given.

    `dim` is the number of parameters; without it, a setting that depends on it is None unless it is given.
    """
    defaults = entry(config.method).defaults(config.private)
    if "k" in defaults and dim is not None:
        defaults["k"] = usual_kept(dim)
    return {key: value if getattr(config, key) is None else getattr(config, key) for key, value in defaults.items()}


def needs_dimension(config: RunConfig) -> bool:
    """Whether a setting that is not given depends on the number of parameters."""
    return not is_own(config.method) and settings_used(config).get("k", 0) is None


def entry(method: str) -> Entry:
    """The catalogue's entry; raises `UsageError` where there is none."""
    one_of(METHODS, method=method)
    return CATALOGUE[method]


def own_settings_given(config: RunConfig) -> dict[str, Any]:
    """The settings that are given for a method of the user's own, under its names or under those of `SETTINGS`."""
    shared = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) is not None}
    return shared | parse_assignments(config.method_settings or "")


def own_settings_used(config: RunConfig) -> str | None:
    """The settings of a method of the user's own, with the defaults of its class, as `method_settings` holds them."""
    declared = registry.settings_of(registry.find(config.method))
    defaults = {name: one.default for name, one in declared.items() if one.default is not one.empty}
    used = {**defaults, **own_settings_given(config)}
    return format_assignments({name: value for name, value in used.items() if _is_plain(value)}) or None


def _is_plain(value: Any) -> bool:
    """Whether KEY=VALUE,… can hold a value."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int) or (isinstance(value, str) and "," not in value)


def _own(config: RunConfig) -> Method:
    """A method of the user's own, or of another package."""
    given = own_settings_given(config)
    known = settings_of(config.method)
    for name in given:
        if name not in known:
            raise UsageError(
                f"{config.method} has no setting {name!r}{nearest(name, known)}; it has {', '.join(known) or 'none'}"
            )
    return registry.build(config.method, given)
