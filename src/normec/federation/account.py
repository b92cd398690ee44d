"""A party's account: every noisy message it ever made, over all runs, paid for before it leaves.

One file for all runs, so that a new run cannot spend the same budget again. Formal guarantee as in `privacy.ledger`:
a message waits for `pay` to return, so what left is among the lines. ε is computed from the lines at the policy's δ;
the budget may be changed by the party, the unit and relation may not, for the multipliers rest on them.

A party that lost its disk charges itself for what it may have made before (`recover`): as many as the server has
accepted, and one for each life that ended, for each may have had a message under way.

A ledger that knows less than the rest of the party's folder is refused: every state holds the ledger's head as it was,
and the journal holds a line that says when spending began.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..privacy.accounting import Account, Event
from ..privacy.chain import Chain, Head, LedgerDamaged, LedgerInUse, read_chain
from . import party_state
from .journal import JOURNAL, Journal, read_journal

FILE = "ledger.jsonl"
SPENDING = "spending"  # the journal's event of the first payment
_CURE = "restore the ledger from a copy, or begin an empty folder with what is left of the budget"


class Releases:
    """Verified lines, read: how many for whom, and what they amount to."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines[1:]

    def count(self, run: str | None = None, node: str | None = None) -> int:
        return sum(line["count"] for line in self._of(run, node))

    def epsilon(self, delta: float, run: str | None = None, more: Event | None = None) -> float:
        events = [Event(line["multiplier"], 1.0, line["count"]) for line in self._of(run, None)]
        events += [more] if more is not None else []
        return Account(delta, events).epsilon() if events else 0.0

    def runs(self) -> list[str]:
        return sorted({line["run"] for line in self._lines})

    def recovered(self) -> int:
        return sum(line["count"] for line in self._lines if line["recovered"])

    def _of(self, run: str | None, node: str | None) -> list[dict[str, Any]]:
        return [line for line in self._lines if run in (None, line["run"]) and node in (None, line["node"])]


class PartyAccount:
    """The account, open and locked until `close`."""

    def __init__(self, folder: Path, unit: str, relation: str) -> None:
        self._journal = Journal(folder / JOURNAL)
        try:
            self._chain = Chain(folder / FILE, party_state.newest_ledger(folder))
        except LedgerInUse as error:
            raise UsageError(str(error)) from None
        except LedgerDamaged as error:
            raise UsageError(f"{error}; {_CURE}") from None
        try:
            self._begin({"kind": "header", "format": 1, "unit": unit, "relation": relation})
            if not self.releases.count() and _has_spent(folder):
                raise UsageError(f"{folder / FILE} is empty, and {JOURNAL} says that the party has spent; {_CURE}")
        except BaseException:
            self._chain.close()
            raise

    @property
    def releases(self) -> Releases:
        return Releases(self._chain.lines)

    @property
    def head(self) -> Head:
        """How long the ledger is, and its last hash: for the states to remember."""
        return self._chain.head

    def affords(self, event: Event, epsilon: float, delta: float) -> bool:
        """Whether one more release stays within (epsilon, delta)."""
        return self.releases.epsilon(delta, more=event) <= epsilon

    def pay(self, run: str, node: str, step: int, event: Event, sigma: float) -> None:
        """On return the line is on the disk; only now may anything be computed, and the message leave."""
        self._append(run, node, step, event, sigma, recovered=False)

    def recover(self, run: str, node: str, due: int, event: Event, sigma: float, epsilon: float, delta: float) -> int:
        """Bring this run's count up to `due`, which the server states. Returns how many releases were charged.

        The charge ends one release past the budget. The party then refuses everything, so that nothing is
        under-counted. A server that lies can cost a party its budget, as it could by asking for messages, but no more
        than that. Once the owner raises the budget, the rest is charged for as long as the claim stands.
        """
        missing = due - self.releases.count(run, node)
        if missing <= 0 or self.releases.epsilon(delta) > epsilon:
            return 0
        charged = min(missing, self._affordable(event, missing, epsilon, delta) + 1)
        self._append(run, node, due, Event(event.multiplier, event.rate, charged), sigma, recovered=True)
        return charged

    def _affordable(self, event: Event, most: int, epsilon: float, delta: float) -> int:
        """How many releases like `event` stay within the budget, at most `most`."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.affords(Event(event.multiplier, event.rate, middle), epsilon, delta):
                low = middle
            else:
                high = middle
        return low

    def _append(self, run: str, node: str, step: int, event: Event, sigma: float, recovered: bool) -> None:
        if event.rate != 1:
            raise UsageError("a party claims no gain from sampling")
        line = {"kind": "release", "run": run, "node": node, "step": step, "count": event.count, "sigma": sigma}
        line |= {"multiplier": event.multiplier, "recovered": recovered}
        self._chain.append(line)
        self._chain.lines.append(line)
        if len(self._chain.lines) == 2:
            self._journal.note(SPENDING, run=run, node=node)

    def _begin(self, header: dict[str, Any]) -> None:
        if not self._chain.lines:
            self._chain.append(header)
            self._chain.lines.append(header)
        first = self._chain.lines[0]
        for name, value in header.items():
            if first.get(name) != value:
                raise UsageError(
                    f"{self._chain.path} was begun for {name} = {first.get(name)!r}, got {value!r}; "
                    "keep the policy's unit and relation, or begin another folder with what is left of the budget"
                )

    def close(self) -> None:
        self._chain.close()


def read_releases(folder: Path) -> Releases:
    """What a party's account says, without a lock."""
    path, known = folder / FILE, party_state.newest_ledger(folder)
    if not path.exists():
        if known is not None or _has_spent(folder):
            raise UsageError(f"{path} is gone, and the rest of the folder says that the party has spent; {_CURE}")
        return Releases([])
    try:
        return Releases(read_chain(path, known).lines)
    except LedgerDamaged as error:
        raise UsageError(f"{error}; {_CURE}") from None


def _has_spent(folder: Path) -> bool:
    return any(line.get("event") == SPENDING for line in read_journal(folder / JOURNAL))
