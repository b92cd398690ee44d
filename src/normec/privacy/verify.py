"""The ledger of a run on disk, held against what the run's checkpoint and summary say was spent.

An ε that is read from a file is only worth its ledger: it is shown where the ledger is there, its hashes verify, the
checkpoint recognises it, and its lines amount to that ε. The checks read the folder and change nothing in it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..file_reading import read_bytes, read_if_present
from .accounting import Account, Event
from .chain import Head, LedgerDamaged, read_chain

MOST_BEYOND = 10**9  # releases beyond a ledger that a summary may speak of
CURE = "restore the run's folder from a backup; its epsilon is not shown"


class Paid(NamedTuple):
    """What a ledger's lines amount to: exactly, where a summary says the same, else rounded up (`Account.upper`)."""

    epsilon: float
    releases: int


def verified(folder: Path, summary: Mapping[str, Any] | None = None) -> Paid | None:
    """What a run has paid for by its ledger; None for a run without privacy, or without releases.

    Args:
        folder: The run's folder.
        summary: What its summary.json says; where there is none, {"final": its last row}.

    Raises:
        UsageError: The ledger is missing, damaged, or does not amount to what the summary says.
    """
    spent, head = (summary or {}).get("privacy"), _head_in_checkpoint(folder)
    path, final = folder / "ledger.jsonl", (summary or {}).get("final")
    missing = read_if_present(path) is None
    told = isinstance(spent, Mapping) or (isinstance(final, Mapping) and final.get("epsilon") is not None)
    if missing and head is None and not told:
        return None
    if missing:
        raise UsageError(f"{path} is missing; {CURE}")
    try:
        header, *lines = read_chain(path, head).lines or [{}]
        events = [Event(line["multiplier"], line["rate"], line["count"]) for line in lines]
        paid = Paid(float(lines[-1]["epsilon"]), int(lines[-1]["releases"])) if lines else Paid(0.0, 0)
        delta = float(header["privacy"]["delta"])
    except (LedgerDamaged, OSError) as error:
        raise UsageError(f"{error}; {CURE}") from None
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path} is not what a run writes; {CURE}") from None
    if not isinstance(spent, Mapping):
        return paid
    return _agreed(path, spent, paid, events, delta, ended=(summary or {}).get("status") == "finished")


def _agreed(
    path: Path, spent: Mapping[str, Any], paid: Paid, events: list[Event], delta: float, *, ended: bool
) -> Paid:
    """Refuse a summary that its ledger does not bear out; that of a run which went on since may know less."""
    said, releases, beyond = spent.get("epsilon"), spent.get("releases"), spent.get("beyond_ledger", 0)
    if not isinstance(said, float) or not isinstance(releases, int) or spent.get("delta") != delta:
        raise UsageError(f"{path} does not belong to the summary.json beside it; {CURE}")
    if isinstance(beyond, int) and 0 < beyond <= MOST_BEYOND and events:
        # A party may have released more often than the server's rounds: as if the last release had been made again.
        events = [*events, dataclasses.replace(events[-1], count=beyond)]
        paid = Paid(Account(delta, events).epsilon(), paid.releases + beyond)
    if releases < paid.releases and not ended:
        return paid
    exact = paid.epsilon
    if releases == paid.releases and events and not math.isclose(said, exact, rel_tol=1e-9):
        exact = Account(delta, events).epsilon()
    if releases != paid.releases or not math.isclose(said, exact, rel_tol=1e-9):
        raise UsageError(
            f"{path} amounts to epsilon = {exact:.6g} in {paid.releases} releases, summary.json says {said:.6g} in "
            f"{releases}; {CURE}"
        )
    return Paid(exact, releases)


def _head_in_checkpoint(folder: Path) -> Head | None:
    """The ledger as the run's checkpoint knew it; None where the checkpoint is gone or says nothing of one."""
    try:
        known = json.loads(read_bytes(folder / "checkpoint" / "latest.json"))["ledger"]
        return Head(int(known[0]), str(known[1]))
    except (OSError, UsageError, ValueError, AttributeError, TypeError, LookupError, OverflowError, RecursionError):
        return None
