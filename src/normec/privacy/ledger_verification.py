"""Compare the ledger of a run with the spending that its checkpoint and summary state.

An ε that is read from a file is shown only if the ledger supports it:

- the ledger exists, its hashes verify, and it continues the one whose head the checkpoint holds;
- its releases amount to that ε, which is computed again;
- no line charges less, or gains more from sampling, than the statement allows;
- the settings beside it have the δ, unit, relation, trust, noise and groups of the ledger.

What the ε promises is said in the words of the statement in the ledger, because a summary may say anything. The checks
read the folder and change nothing in it. They find damage and mistakes. Whoever writes a ledger can also write another
one that fits together, so they are no proof against the owner of the run.

Under local trust a party of a federation may have released more messages than the server's ledger has rounds. Their
number follows from the records of the parties ("seats") in the server's checkpoint, which is written before a party can
make its next message. So it is known even if the server was killed and left no summary, or an old one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..system.files import read_bytes, read_if_present
from .accounting import Account, Event
from .hash_chain import Head, LedgerDamaged, read_chain
from .ledger import AMENDMENT, charged_events, dearer
from .statement import Privacy

MOST_BEYOND = 10**9  # the most releases beyond a ledger that a summary may state
_LATEST = Path("checkpoint") / "latest.json"
_TOLERANCE = 1e-9  # relative, of an ε in closed form
_SAMPLED_TOLERANCE = 0.01  # of an ε of sampled releases, which depends on the version of the accountant's library
TERMS = ("delta", "unit", "relation", "trust", "noise", "groups")  # of a guarantee, beside its ε
_RESULTS = ("finished", "stopped")  # whose summaries state what was spent
CURE = "restore the run's folder from a backup; its epsilon is not shown"


class Paid(NamedTuple):
    """The ε of a ledger, exact if the summary states the same, else rounded up (`Account.upper`), and its statement."""

    epsilon: float
    releases: int
    statement: Privacy

    def promise(self, clients: object) -> str:
        """Who is protected from whom by the releases of the ledger; `clients` is their number, if it is known."""
        return self.statement.covering(self.epsilon).promise(clients if type(clients) is int else None)


def verified(folder: Path, summary: Mapping[str, Any] | None = None) -> Paid | None:
    """The payments in the ledger of a run; None for a run without privacy or without releases.

    Args:
        folder: The folder of the run.
        summary: The contents of its summary.json, if there is one; else at least its last row, as `final`. Its `config`
            are the settings that are shown beside ε.

    Raises:
        UsageError: The ledger is missing, damaged, or contradicts the summary.
    """
    checkpoint, known = _checkpoint(folder), summary or {}
    spent, head = known.get("privacy"), _head_in(checkpoint)
    path = folder / "ledger.jsonl"
    missing = read_if_present(path) is None
    stated = isinstance(spent, Mapping) or _states_epsilon(known.get("final"))
    if missing and head is None and not stated:
        return None
    if missing:
        raise UsageError(f"{path} is missing; {CURE}")
    try:
        header, *rest = read_chain(path, head).lines or [{}]
        statement = _statement(header, rest)
        lines = [line for line in rest if line.get("kind") != AMENDMENT]
        groups = operator.index(header.get("groups", 1))
        _refuse_small_charges(lines, groups, statement)
        events = charged_events(lines)
        delta = float(header["privacy"]["delta"])
        last = Paid(0.0, 0, statement)
        if lines:
            last = Paid(float(lines[-1]["epsilon"]), int(lines[-1]["releases"]), statement)
        local = header["privacy"]["trust"] == "local"
        scheduled = "noise_schedule" in header["privacy"]
        seeded = header["privacy"].get("noise") == "seeded"
        paid = last._replace(epsilon=_amount(last.epsilon, events, delta))
    except (LedgerDamaged, OSError) as error:
        raise UsageError(f"{error}; {CURE}") from None
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(f"{path} is not what a run writes; {CURE}") from None
    _refuse_other_terms(path, {**header["privacy"], "groups": groups}, known.get("config"))
    beyond = max(_beyond(folder, checkpoint, paid.releases, scheduled) if local else 0, _beyond_in(spent))
    if beyond and events:  # counted like the release with the least noise
        least = min(events, key=lambda event: event.multiplier)
        events = [*events, dataclasses.replace(least, count=beyond)]
        paid = Paid(_epsilon(tuple(events), delta), paid.releases + beyond, statement)
    if not math.isfinite(paid.epsilon):  # a ledger writes no such release
        raise UsageError(f"{path} is not what a run writes; {CURE}")
    if not isinstance(spent, Mapping):
        if "privacy" in known or known.get("status") in _RESULTS:
            raise UsageError(f"{path} has {paid.releases} releases, and summary.json states no privacy; {CURE}")
        return paid
    if spent.get("simulation", seeded) != seeded:
        kind = "a simulation" if seeded else "no simulation"
        raise UsageError(f"{path} is that of {kind}, and summary.json says otherwise; {CURE}")
    return _agreed(path, spent, paid, events, delta, ended=known.get("status") == "finished")


def _statement(header: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Privacy:
    """The statement that a ledger was opened for; later lines can only have raised its ε."""
    stated = dict(header["privacy"])
    for line in lines:
        if line.get("kind") == AMENDMENT:
            stated["epsilon"] = line["privacy"]["epsilon"]
    return Privacy(**stated)


def _refuse_small_charges(lines: Sequence[Mapping[str, Any]], groups: int, statement: Privacy) -> None:
    """Raise `ValueError` if a line charges less than a run with these groups pays, or claims a gain nobody stated.

    The rounds of a run follow each other, so a round that is not later than all before it is released again.
    """
    if groups < 1:
        raise ValueError(f"{groups} groups")
    rate = statement.sampling if statement.sampling is not None else 1.0
    latest, paid = -1, None  # the latest round so far, and the payment for its cycle
    for line in lines:
        event = Event(line["multiplier"], line["rate"], line["count"])
        first = operator.index(line["round"])
        last, again = first + event.count - 1, first <= latest
        if event.rate < (1.0 if again else rate) and (again or statement.unit == "client"):
            raise ValueError("a gain from coins that are not those of the statement")
        covers = paid is not None and not dearer(event, paid)
        known = latest // groups if covers else first // groups - 1  # the latest cycle that is paid for
        cycles = last // groups - max(known, first // groups - 1)
        if line.get("charged", event.count) < (event.count if again or groups == 1 else cycles):
            raise ValueError("a charge that is too small")
        if not covers or last // groups > latest // groups:
            paid = event
        latest = max(latest, last)


def _refuse_other_terms(path: Path, promised: Mapping[str, Any], settings: object) -> None:
    """Refuse settings under which the ε of the ledger would promise something else."""
    stated = dict(settings) if isinstance(settings, Mapping) else {}
    if "private" in stated and stated.get("groups") is None:
        stated["groups"] = 1  # all clients may take part in every round
    for name in TERMS:
        if stated.get(name) not in (None, promised.get(name)):
            raise UsageError(
                f"{path} is that of a run with {name} = {promised.get(name)!r}, and the settings say {stated[name]!r}; "
                f"{CURE}"
            )


def _amount(stated: float, events: Sequence[Event], delta: float) -> float:
    """The ε that the last line states, or that of all releases if it is larger."""
    exact = _epsilon(tuple(events), delta) if events else 0.0
    tolerance = _SAMPLED_TOLERANCE if any(event.rate < 1 for event in events) else _TOLERANCE
    return stated if stated >= (1 - tolerance) * exact else exact


@lru_cache(maxsize=256)
def _epsilon(events: tuple[Event, ...], delta: float) -> float:
    """The ε of a ledger; the cells of a sweep often have the same releases, and sampled ones take a second."""
    return Account(delta, events).epsilon()


def _states_epsilon(final: object) -> bool:
    """Whether the last row of a run states an ε, which needs a ledger even if summary and checkpoint are missing."""
    return isinstance(final, Mapping) and final.get("epsilon") is not None


def _beyond(folder: Path, checkpoint: Mapping[str, Any], paid: int, scheduled: bool) -> int:
    """How many messages a party may have made beyond the `paid` rounds of its server (`server_state.PartyRecord`).

    If the noise is `scheduled`, one message in every round is counted, whether the party made it or not.
    """
    if "seats" not in checkpoint:
        return 0
    try:
        opened = min(int(checkpoint["round"]) + 1, paid)
        made = [
            (paid if scheduled else min(int(party["accepted"]) + 1, opened))
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
    """How many messages beyond the ledger a summary states; 0 if it states none, or an impossible number."""
    beyond = spent.get("beyond_ledger", 0) if isinstance(spent, Mapping) else 0
    return beyond if isinstance(beyond, int) and 0 < beyond <= MOST_BEYOND else 0


def _agreed(
    path: Path, spent: Mapping[str, Any], paid: Paid, events: list[Event], delta: float, *, ended: bool
) -> Paid:
    """Refuse a summary that contradicts its ledger; if the run continued since then, the summary may state less."""
    said, releases = spent.get("epsilon"), spent.get("releases")
    if not isinstance(said, float) or math.isnan(said) or not isinstance(releases, int) or spent.get("delta") != delta:
        raise UsageError(f"{path} does not belong to the summary.json in its folder; {CURE}")
    if releases < paid.releases and not ended:
        return paid._replace(epsilon=max(said, paid.epsilon))  # a rule that stopped the run stated that of all rounds
    exact = paid.epsilon
    if releases == paid.releases and events and not math.isclose(said, exact, rel_tol=_TOLERANCE):
        exact = _epsilon(tuple(events), delta)
    if releases == paid.releases and spent.get("stopped_by_rule") is True and said >= exact:
        return paid._replace(epsilon=said)  # that of all planned rounds
    if releases != paid.releases or not math.isclose(said, exact, rel_tol=_TOLERANCE):
        raise UsageError(
            f"{path} amounts to epsilon = {exact:.6g} in {paid.releases} releases, summary.json says {said:.6g} in "
            f"{releases}; {CURE}"
        )
    return paid._replace(epsilon=exact)


def _checkpoint(folder: Path) -> Mapping[str, Any]:
    """The contents of the run's checkpoint; empty if it is missing or damaged."""
    try:
        found = json.loads(read_bytes(folder / _LATEST))
    except (OSError, UsageError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _head_in(checkpoint: Mapping[str, Any]) -> Head | None:
    """The head of the ledger in the run's checkpoint, if it has one."""
    try:
        known = checkpoint["ledger"]
        return Head(int(known[0]), str(known[1]))
    except (ValueError, TypeError, LookupError, OverflowError):
        return None
