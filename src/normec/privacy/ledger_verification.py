"""The ledger of a run on disk, held against what the run's checkpoint and summary say was spent.

An ε that is read from a file is only worth its ledger: it is shown where the ledger is there, its hashes verify, the
checkpoint recognises it, and its lines amount to that ε. The checks read the folder and change nothing in it.

Under local trust a party of a federation may have released more messages than the server's ledger has rounds. How many
follows from the seats in the server's checkpoint, which is written before a party can make the next of them: so it is
known also where the server was killed and left no summary, or an old one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..system.files import read_bytes, read_if_present
from .accounting import Account, Event
from .hash_chain import Head, LedgerDamaged, read_chain

MOST_BEYOND = 10**9  # releases beyond a ledger that a summary may speak of
_LATEST = Path("checkpoint") / "latest.json"
CURE = "restore the run's folder from a backup; its epsilon is not shown"


class Paid(NamedTuple):
    """What a ledger's lines amount to: exactly, where a summary says the same, else rounded up (`Account.upper`)."""

    epsilon: float
    releases: int


def verified(folder: Path, summary: Mapping[str, Any] | None = None) -> Paid | None:
    """What a run has paid for by its ledger; None for a run without privacy, or without releases.

    Args:
        folder: The run's folder.
        summary: What its summary.json says, where there is one; else at least its last row, as `final`.

    Raises:
        UsageError: The ledger is missing, damaged, or does not amount to what the summary says.
    """
    checkpoint = _checkpoint(folder)
    spent, head = (summary or {}).get("privacy"), _head_in(checkpoint)
    path = folder / "ledger.jsonl"
    missing = read_if_present(path) is None
    told = isinstance(spent, Mapping) or _rows_tell((summary or {}).get("final"))
    if missing and head is None and not told:
        return None
    if missing:
        raise UsageError(f"{path} is missing; {CURE}")
    try:
        header, *lines = read_chain(path, head).lines or [{}]
        events = [Event(line["multiplier"], line["rate"], line["count"]) for line in lines]
        paid = Paid(float(lines[-1]["epsilon"]), int(lines[-1]["releases"])) if lines else Paid(0.0, 0)
        delta = float(header["privacy"]["delta"])
        local = header["privacy"]["trust"] == "local"
    except (LedgerDamaged, OSError) as error:
        raise UsageError(f"{error}; {CURE}") from None
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path} is not what a run writes; {CURE}") from None
    beyond = max(_beyond(folder, checkpoint, paid.releases) if local else 0, _beyond_in(spent))
    if beyond and events:  # as if the last release had been made again
        events = [*events, dataclasses.replace(events[-1], count=beyond)]
        paid = Paid(Account(delta, events).epsilon(), paid.releases + beyond)
    if not isinstance(spent, Mapping):
        return paid
    return _agreed(path, spent, paid, events, delta, ended=(summary or {}).get("status") == "finished")


def _rows_tell(final: object) -> bool:
    """Whether a run's last row states an ε, which then needs a ledger even where summary and checkpoint are gone."""
    return isinstance(final, Mapping) and final.get("epsilon") is not None


def _beyond(folder: Path, checkpoint: Mapping[str, Any], paid: int) -> int:
    """By how many messages a party may be ahead of the `paid` rounds of its server (`server_state.PartyRecord`)."""
    if "seats" not in checkpoint:
        return 0
    try:
        opened = min(int(checkpoint["round"]) + 1, paid)
        made = [
            min(int(party["accepted"]) + 1, opened)
            + int(party.get("drops", 0))
            + max(0, int(party.get("lives", 0)) - 1, len(party["tokens"]) - 1)
            for party in checkpoint["seats"].values()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError(f"{folder / _LATEST} is not what a run writes; {CURE}") from None
    beyond = max(made, default=0) - paid
    if beyond > MOST_BEYOND:
        raise UsageError(f"{folder / _LATEST} is not what a run writes; {CURE}")
    return max(0, beyond)


def _beyond_in(spent: object) -> int:
    """What a summary says of the same."""
    beyond = spent.get("beyond_ledger", 0) if isinstance(spent, Mapping) else 0
    return beyond if isinstance(beyond, int) and 0 < beyond <= MOST_BEYOND else 0


def _agreed(
    path: Path, spent: Mapping[str, Any], paid: Paid, events: list[Event], delta: float, *, ended: bool
) -> Paid:
    """Refuse a summary that its ledger does not bear out; that of a run which went on since may know less."""
    said, releases = spent.get("epsilon"), spent.get("releases")
    if not isinstance(said, float) or not isinstance(releases, int) or spent.get("delta") != delta:
        raise UsageError(f"{path} does not belong to the summary.json beside it; {CURE}")
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


def _checkpoint(folder: Path) -> Mapping[str, Any]:
    """What the run's checkpoint says; nothing where it is gone or damaged."""
    try:
        found = json.loads(read_bytes(folder / _LATEST))
    except (OSError, UsageError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _head_in(checkpoint: Mapping[str, Any]) -> Head | None:
    """The ledger as the run's checkpoint knew it; None where it says nothing of one."""
    try:
        known = checkpoint["ledger"]
        return Head(int(known[0]), str(known[1]))
    except (ValueError, TypeError, LookupError, OverflowError):
        return None
