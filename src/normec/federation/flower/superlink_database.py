"""Which parties are online, and when they were last heard, from the database of a SuperLink."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from .run_parties import name_of

_PATIENCE = 2  # after a heartbeat, a party counts as online for so many of its intervals


@dataclass(frozen=True)
class PartyActivity:
    """A registered party: whether it is online, and the time of its last heartbeat in seconds since 1970."""

    online: bool
    last_seen: float | None


def party_activity(database: Path, clock: Callable[[], float] = time.time) -> dict[str, PartyActivity]:
    """The registered parties by name. While a party is online, it sends a heartbeat every half minute.

    Raises:
        UsageError: The file is not the database of a SuperLink.
    """
    if not database.is_file():
        raise UsageError(f"there is no database {database}; give the --database of `normec federation superlink`")
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as held:
            rows = held.execute(
                "SELECT public_key, status, online_until, heartbeat_interval FROM node WHERE unregistered_at IS NULL "
                "OR unregistered_at = ''"
            ).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"{database} is not the database of a SuperLink: {error}") from None
    found = {}
    for key, status, until, interval in rows:
        if key is None:
            continue
        ahead = (
            _PATIENCE * (interval or 0.0) if status == "online" else 0.0
        )  # a party that ends is offline from then on
        seen = until - ahead if until else None
        found[name_of(bytes(key))] = PartyActivity(status == "online" and (until or 0.0) > clock(), seen)
    return found
