"""A party that leaves a run for good.

The party writes the name of the run into its folder and refuses every later request of it, whatever its policy says,
also after a restart. It keeps its ledger: what was sent stays spent. docs/guides/federation.md, "A party leaves", says
what the other parties can do.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...system.files import private_folder, read_if_present, write_atomic
from .policy import Verdict
from .wire import NAME, run_name

FILE = "departures.json"


def departures(folder: Path) -> dict[str, Any]:
    """The runs that the party has left, by name, with the time of leaving. Raises `UsageError` for a damaged file."""
    content = read_if_present(folder / FILE)
    if content is None:
        return {}
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    except (ValueError, RecursionError):
        pass
    raise UsageError(f"{folder / FILE} is damaged: it must be a table of runs; restore it from a backup")


def leave(folder: Path, run: str, known_runs: Collection[str] | None = None) -> None:
    """Leave a run for good.

    Args:
        folder: The party's folder.
        run: The name of the run.
        known_runs: The runs that the party's ledger, terms or policy names; None accepts any name.

    Raises:
        UsageError: The party has left the run already, knows no run of this name, or no run can have this name.
    """
    if not NAME.fullmatch(run):
        raise UsageError(f"{run!r} cannot be the name of a run; use the name without its random number")
    known = departures(folder)
    if run in known:
        raise UsageError(f"this party left run {run} on {known[run]}")
    if known_runs is not None and run not in known_runs:
        raise UsageError(
            f"this party knows no run {run}; its ledger, terms and policy name "
            f"{', '.join(sorted(known_runs)) or 'none: state the runs to take part in as `runs` in the policy'}"
        )
    private_folder(folder)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    write_atomic(folder / FILE, json.dumps({**known, run: time}, indent=1) + "\n", private=True)


def check_departure(folder: Path, run: str) -> Verdict | None:
    """The refusal of a run that the party has left; None for any other run."""
    when = departures(folder).get(run_name(run))
    return None if when is None else Verdict("terms", f"this party left run {run_name(run)} on {when}")
