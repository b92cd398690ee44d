"""Suggested settings of a configuration, and the command that trains with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from ..settings.config import SETTINGS, RunConfig
from ..settings.data_defaults import settings_of_data
from ..settings.declaration import text_of
from ..training.suggestion import SuggestedSetting, Suggestion, suggest
from . import build, methods

# Settings that a suggestion chooses, or that its rule does not cover.
NOT_GIVEN = (
    *(*methods.OF_METHODS, *methods.LOCAL),
    *("lr", "epochs", "batch_size", "batch_rate", "sample_rate", "sample_count", "server_optimizer", "warmup"),
    *("groups", "noise_bands"),
)


def suggested(config: RunConfig) -> Suggestion:
    """Return suggested settings for the data, model and privacy of a configuration.

    The data are loaded to count the clients, the parameters and, where records are protected, the records of each
    client; nothing else in them is used. A data set with settings of its own (`settings.data_defaults`) keeps them.

    Raises:
        UsageError: A setting is given that the suggestion chooses, or there is no rule for the configuration.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    for name in NOT_GIVEN:
        if given.get(name) is not None:
            raise UsageError(f"a suggestion is for runs without {name}; leave it out")
    usual = settings_of_data(given)
    named = "method" in given or "method" in usual
    found = suggest(
        build.problem(config),
        config.method if named else None,
        privacy=build.privacy(config),
        rounds=given.get("rounds", usual.get("rounds")),
        weights=build.weights(config.weights),
        public_sizes=config.public_sizes,
    )
    own = {name: value for name, value in usual.items() if name in found.values}
    if "lr" not in own:
        return found
    reason = f"Chosen by cross-validation on {config.data}, whose records are public."
    kept = [one for one in found.chosen if one.name not in own]
    return replace(found, chosen=(*kept, *(SuggestedSetting(name, value, reason) for name, value in own.items())))


def command(found: Suggestion, given: Mapping[str, Any], file: str | None = None) -> str:
    """Return the command that trains with a suggestion.

    Args:
        found: The suggestion.
        given: The settings that were given to it on the command line.
        file: The file of settings that was given to it.
    """
    words = ["normec", "train", *([file] if file is not None else [])]
    settings = {**given, "method": found.method, **found.values}
    return shlex.join([*words, *_flags(settings)])


def _flags(settings: Mapping[str, Any]) -> Iterable[str]:
    """The settings as flags, or as assignments where they have no flag."""
    for name, value in settings.items():
        flag = SETTINGS[name].flag_name
        if "/" in flag and isinstance(value, bool):
            yield flag.split("/")[0 if value else 1]
        elif flag and "/" not in flag:
            yield from (flag, text_of(value))
        else:
            yield from ("--set", f"{name}={text_of(value)}")
