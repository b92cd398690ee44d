"""Checked configurations, made from tables of settings and from TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..algorithms.catalogue import is_own
from ..errors import UsageError, first_mistake, nearest
from ..system.files import read_toml
from .assignments import format_assignments, parse_assignments
from .config import RunConfig
from .data_defaults import usual_settings


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration in a TOML file with `overrides`; raises `UsageError` with one line."""
    settings: dict[str, Any] = {}
    if path is not None:
        from ..data.entries import ENTRIES  # with torch, which completion in a shell does without
        from ..data.table import is_table

        if is_table(str(path)):
            raise UsageError(f"{path} is a table and no file of settings; give it as --data {path} --target COLUMN")
        try:
            settings = read_toml(Path(path))
        except FileNotFoundError:
            cure = f"; a data set is named with --data {path}" if str(path) in ENTRIES else ""
            raise UsageError(f"there is no configuration file {path}{cure}") from None
    return make({**settings, **(overrides or {})})


def make(settings: Mapping[str, Any]) -> RunConfig:
    """Return a checked configuration with the defaults of its data set; integers are accepted for floats."""
    fields = RunConfig.model_fields
    own = {key: value for key, value in settings.items() if key not in fields}
    if own and is_own(str(settings.get("method", ""))):
        settings = {key: value for key, value in settings.items() if key in fields}
        own = parse_assignments(settings.get("method_settings") or "") | own
        settings["method_settings"] = format_assignments(own)
    for key, value in settings.items():
        if key not in fields and isinstance(value, Mapping):
            raise UsageError(f"a file of settings has no sections; move the settings below [{key}] to its top")
        if key not in fields:
            raise UsageError(f"there is no setting {key!r}{nearest(key, fields)}; `normec train --settings` lists all")
    for key in ("data", "model", "method"):
        if str(settings.get(key, "")).endswith(".py"):
            raise UsageError(f"{key} must name something in the file, as {settings[key]}:NAME, got {settings[key]!r}")
    if settings.get("private") is False:
        settings = {"seed": 0, **settings}  # nothing in the run is secret, so the default seed is 0
    try:
        checked = RunConfig.model_validate({**usual_settings(settings), **settings})
        return RunConfig.model_construct(_fields_set=set(settings), **dict(checked))
    except ValidationError as error:
        raise UsageError(first_mistake(error, levels=1)) from None
