"""Settings as text: KEY=VALUE for one setting, and KEY=VALUE,… for several."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

from ..errors import UsageError

Scalar = str | int | float | bool


def parse_assignment(text: str) -> tuple[str, Scalar]:
    """Parse 'key=value' with the value in TOML; a bare word is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UsageError(f"expected key=value, such as epsilon=4, got {text!r}")
    try:
        parsed: Scalar = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return key.strip(), parsed


def parse_assignments(text: str) -> dict[str, Scalar]:
    """'key=value,key=value' as a table; a value may be a list, [1,2], whose commas divide nothing."""
    return dict(parse_assignment(part) for part in re.split(r",(?![^\[\]]*\])", text) if part.strip())


def format_assignments(table: Mapping[str, Scalar]) -> str:
    """Return a table as text that `parse_assignments` reads."""
    return ",".join(f"{key}={json.dumps(table[key])}" for key in sorted(table))
