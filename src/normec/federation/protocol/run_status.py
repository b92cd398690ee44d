"""The state of a federated run, from the files in the server's folder. Nothing is locked or changed.

The checkpoint has the round and the server's record of each party, the ledger what the run has paid for, and the
journal what was dropped, refused or suspended. A party's ε here is what the server knows: that of the messages which
the party may have made in this run. Only the party knows what it has spent: in all its runs, and in a run with secure
sums on vectors of attempts that came to nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...privacy.accounting import Account, Event
from ...privacy.hash_chain import LedgerDamaged, read_chain
from ...privacy.ledger_verification import verified
from ...settings.validation import load
from ...storage.checkpoint import read_facts
from ...storage.run_folder import CONFIG
from ...system.files import parse_json, read_if_present
from .journal import JOURNAL, read_journal
from .server_state import PARTIES, PartyRecord


@dataclass(frozen=True)
class PartyStatus:
    """What the server knows of one party.

    `accepted` messages are part of the model, `made` is the most that the party may have made, and `behind` the number
    of finished rounds since its last message. In a run with secure sums, messages are vectors in opened sums, and the
    one under way. `epsilon` is that of all messages that the party may have made, or that of the run if the observer
    sees sums or the noise changes by round; None without privacy.
    """

    name: str
    accepted: int
    made: int
    behind: int
    faults: int
    events: dict[str, int]
    epsilon: float | None


@dataclass(frozen=True)
class RunStatus:
    """The state of a run: `status` is "running or stopped" until a summary says more."""

    name: str
    status: str
    round: int
    rounds: int | None
    epsilon: float | None
    delta: float | None
    unit: str
    parties: tuple[PartyStatus, ...]
    last_event: dict[str, Any] | None


def run_status(folder: Path) -> RunStatus:
    """Read the state of a run. Raises `UsageError` if the folder holds no federated run, or a damaged one."""
    facts = read_facts(folder / "checkpoint")
    if facts is None or PARTIES not in facts:
        raise UsageError(f"{folder} holds no federated run that has begun; give the server's folder of the run (out)")
    records = {name: PartyRecord.from_facts(known) for name, known in facts[PARTIES].items()}
    summary = _summary(folder)
    paid = verified(folder, summary or None)
    events, header = _events(folder)
    config = load(folder / CONFIG) if (folder / CONFIG).exists() else None
    journal = read_journal(folder / JOURNAL)
    opened = min(facts["round"] + 1, sum(event.count for event in events)) if events else facts["round"] + 1
    privacy = header.get("privacy", {})
    parties = tuple(
        PartyStatus(
            name,
            record.accepted,
            record.made(opened),
            facts["round"] - record.since if record.accepted else facts["round"],
            record.faults,
            dict(Counter(str(line["event"]) for line in journal if line.get("party", line.get("node")) == name)),
            _epsilon(record, opened, events, privacy, None if paid is None else paid.epsilon),
        )
        for name, record in records.items()
    )
    return RunStatus(
        str(facts["identity"].get("run", folder.name)),
        str(summary.get("status", "running or stopped")),
        int(facts["round"]),
        config.rounds if config is not None else None,
        None if paid is None else paid.epsilon,
        privacy.get("delta"),
        str(privacy.get("unit", "")),
        parties,
        journal[-1] if journal else None,
    )


def _epsilon(
    record: PartyRecord, opened: int, events: list[Event], privacy: dict[str, Any], whole: float | None
) -> float | None:
    """The ε of the messages that a party may have made; that of the run if sums are seen or the noise changes."""
    if whole is None or not events:
        return whole
    constant = len({(event.multiplier, event.rate) for event in events}) == 1
    if privacy.get("trust") != "local" or not constant:
        return whole
    made = record.made(opened)
    return Account(privacy["delta"], [Event(events[0].multiplier, events[0].rate, made)]).epsilon() if made else 0.0


def _events(folder: Path) -> tuple[list[Event], dict[str, Any]]:
    """The releases in the run's ledger, and its header; empty without privacy."""
    if read_if_present(folder / "ledger.jsonl") is None:
        return [], {}
    try:
        header, *lines = read_chain(folder / "ledger.jsonl").lines or [{}]
    except LedgerDamaged as error:
        raise UsageError(str(error)) from None
    return [Event(line["multiplier"], line["rate"], line["count"]) for line in lines], header


def _summary(folder: Path) -> dict[str, Any]:
    content = read_if_present(folder / "summary.json")
    found = parse_json(content, str(folder / "summary.json")) if content is not None else {}
    return found if isinstance(found, dict) else {}
