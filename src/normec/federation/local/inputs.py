"""The app, the settings and the tables to which the folder of a federation on this machine belongs.

The folder also holds the parties' memories and accounts, which are about the records that a party had when the run
began. With other tables an account would count messages about other records, and a finished run would be shown as the
result of tables that it has never seen.

OUT/federation/inputs.json has the name of the app, the settings that no other file of the run holds, and a SHA-256 of
each table, in the order of the parties.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...system.files import read_bytes, read_json, write_atomic
from ..flower.settings import Settings
from ..protocol import account

FILE = "inputs.json"
SETTINGS = ("min_parties", "records", "secure_sum", "colluding")
_CURE = "choose another folder with --out"


def claim(home: Path, app: Path, settings: Settings, tables: Sequence[Path]) -> None:
    """Note what the federation in `home` works on, or compare it with what was noted when its run began.

    Args:
        home: The folder of the federation, in that of its run.
        app: The folder of the app.
        settings: The settings of the run.
        tables: The table of each party; empty if the app has the data.

    Raises:
        UsageError: A run has begun there with another app, other settings or other tables.
    """
    given: dict[str, Any] = {"app": app.name, **{name: getattr(settings, name) for name in SETTINGS}}
    given["tables"] = [digest(table) for table in tables]
    noted = home / FILE
    begun = (home.parent / "config.toml").exists() or any(home.glob(f"parties/*/{account.FILE}"))
    if begun and noted.exists():
        _compare(home.parent, read_json(noted), given, tables)
        return
    write_atomic(noted, json.dumps(given, indent=1) + "\n", private=True)


def digest(table: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(read_bytes(table)).hexdigest()


def _compare(out: Path, known: Any, given: dict[str, Any], tables: Sequence[Path]) -> None:
    if not isinstance(known, dict) or known.keys() != given.keys() or not isinstance(known["tables"], list):
        raise UsageError(f"{out / 'federation' / FILE} is damaged; restore it from a backup, or {_CURE}")
    for name in ("app", *SETTINGS):
        if known[name] != given[name]:
            raise UsageError(
                f"{out} holds a federation of another configuration: {name} is {known[name]!r} there, {given[name]!r} "
                f"here; {_CURE}"
            )
    before, now = known["tables"], given["tables"]
    if len(before) != len(now):
        raise UsageError(f"{out} holds a federation with {len(before)} tables, got {len(now)}; {_CURE}")
    for party, (one, other) in enumerate(zip(before, now, strict=True)):
        if one != other:
            raise UsageError(
                f"{out} holds a federation in which party-{party} had another table than {tables[party]}; {_CURE}"
            )
