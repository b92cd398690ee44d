"""A party's account: every message that the party has made in any run, written down before it is sent.

All runs share one file, so that a new run cannot spend the same budget again. The formal guarantee is that of
`privacy.ledger`: a message is sent only after `pay` returns, so every message that was sent has a line. A line has one
noise multiplier for an observer of the client, and one for an observer of a single record, with the rate at which
records are drawn (`price`). So there are two accounts side by side, and ε of each is computed from the lines at the
policy's δ. The party may change its budgets and the unit that they protect, but not the relation, because the noise
multipliers depend on it. Messages of runs without noise have lines of another kind: they are counted, but no ε covers
them.

A party that lost its disk charges itself for all messages that it may have made before (`recover`): those that the
server accepted or dropped, and one for each earlier handshake, because a message may have been under way each time.

A ledger that is shorter than the rest of the party's folder implies is refused. Every state holds the head that the
ledger had when the state was written, and the file `MARK` records that a ledger was begun, even if the states and the
journal are lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...errors import UsageError
from ...privacy.accounting import Account, Event
from ...privacy.hash_chain import Chain, Head, LedgerDamaged, LedgerInUse, read_chain
from ...system.files import write_atomic
from . import party_state
from .terms import PrivacyTerms
from .wire import run_name

FILE = "ledger.jsonl"
MARK = "ledger.begun"
_FORMAT, _ONE_UNIT = 2, 1  # of the file; the older one has multipliers for one unit, which the header names
_CURE = "restore the ledger from a copy, or begin an empty folder with what is left of the budget"


class Charged(Protocol):
    """The part of a request that the line of a message repeats: its run, its party and its privacy."""

    @property
    def run(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def privacy(self) -> PrivacyTerms: ...


Events = Mapping[str, Event]  # the cost of one message, by the unit that an account protects
Budgets = Mapping[str, float]  # the largest ε, by unit


class Releases:
    """The verified lines of an account: counts of messages, and their ε."""

    def __init__(self, path: Path, lines: list[dict[str, Any]]) -> None:
        self._path, self._header = path, lines[:1]
        self._lines = [line for line in lines[1:] if line["kind"] == "release"]
        self._without_noise = [line for line in lines[1:] if line["kind"] == "bare"]

    def check(self, relation: str) -> None:
        """Raise `UsageError` if the account was begun for another relation, for which its ε does not hold."""
        wanted = {"kind": "header", "format": _FORMAT, "relation": relation}
        for first in self._header:
            for name, value in wanted.items():
                if first.get(name) != value and (name, first.get(name)) != ("format", _ONE_UNIT):
                    raise UsageError(
                        f"{self._path} was begun for {name} = {first.get(name)!r}, got {value!r}; "
                        "keep the policy's relation, or begin another folder with what is left of the budget"
                    )

    def count(self, run: str | None = None, node: str | None = None) -> int:
        """The number of messages of one run, of all runs with a name, or of all runs."""
        return sum(line["count"] for line in _of(self._lines, run, node))

    def last_step(self, run: str) -> int:
        """The number of the last message of one run, or of the furthest run with a name; 0 if there is none."""
        return max((line["step"] for line in _of(self._lines, run, None)), default=0)

    def epsilon(self, unit: str, delta: float, run: str | None = None) -> float:
        """ε of the account that protects `unit`, in one run or in all runs."""
        account = self.account(unit, delta, run)
        return account.epsilon() if account.releases else 0.0

    def account(self, unit: str, delta: float, run: str | None = None) -> Account:
        first = self._header[0] if self._header else {}
        return Account(delta, [_event(line, unit, first) for line in _of(self._lines, run, None)])

    def runs(self) -> list[str]:
        return sorted({line["run"] for line in self._lines + self._without_noise})

    def recovered(self) -> int:
        return sum(line["count"] for line in self._lines if line["recovered"])

    def without_noise(self, run: str | None = None) -> int:
        """The number of messages of runs without noise."""
        return len(_of(self._without_noise, run, None))

    def central(self) -> int:
        """The number of messages that were sent without noise because a trusted server adds it."""
        return sum(line["count"] for line in self._lines if line.get("trust") == "central")

    def seeded(self) -> int:
        """The number of messages with seeded noise, which protects nobody."""
        return sum(line["count"] for line in self._lines if line.get("noise") == "seeded")


class PartyAccount:
    """An open account; its file is locked until `close`."""

    def __init__(self, folder: Path, relation: str, witness: str | None = None) -> None:
        try:
            self._chain = Chain(folder / FILE, party_state.newest_ledger(folder), witness=witness)
        except LedgerInUse as error:
            raise UsageError(str(error)) from None
        except LedgerDamaged as error:
            raise UsageError(f"{error}; {_CURE}") from None
        try:
            if not self._chain.lines:
                if (folder / MARK).exists():
                    raise UsageError(f"{folder / FILE} is empty, although {MARK} says that it was begun; {_CURE}")
                self._append({"kind": "header", "format": _FORMAT, "relation": relation})
            if not (folder / MARK).exists():  # before the first payment
                write_atomic(folder / MARK, f"{FILE} was begun and must not be missing.\n", private=True)
            self.releases.check(relation)
        except BaseException:
            self._chain.close()
            raise

    @property
    def releases(self) -> Releases:
        return Releases(self._chain.path, self._chain.lines)

    @property
    def head(self) -> Head:
        """The length of the ledger and its last hash, which states remember."""
        return self._chain.head

    def affords(self, price: Events, budgets: Budgets, delta: float, count: int = 1) -> bool:
        """Whether `count` more releases at this price stay within every budget."""
        for unit, epsilon in budgets.items():
            account = self.releases.account(unit, delta)
            account.add(dataclasses.replace(price[unit], count=count))
            if not account.within(epsilon):
                return False
        return True

    def pay(self, request: Charged, step: int, price: Events) -> None:
        """Write the line of a message to the disk. Only after this returns may the message be computed and sent."""
        self._release(request, step, price, 1, recovered=False)

    def note_without_noise(self, request: Charged, step: int) -> None:
        """Write the line of a message of a run without noise; the message may be sent after this returns."""
        self._append({"kind": "bare", "run": request.run, "node": request.node, "step": step})

    def recover(self, request: Charged, due: int, price: Events, budgets: Budgets, delta: float) -> int:
        """Bring this run's count up to `due`, a number that the server states. Returns how many releases were charged.

        The charge stops one release past the budget. The party then refuses everything, so nothing is under-counted. A
        server that lies can cost a party its budget, as it could by asking for messages, but no more than that. If the
        owner raises the budget, the rest is charged as long as the server repeats its claim.
        """
        missing = due - self.releases.count(request.run, request.node)
        accounts = {unit: self.releases.account(unit, delta) for unit in budgets}
        if missing <= 0 or not all(accounts[unit].within(epsilon) for unit, epsilon in budgets.items()):
            return 0
        charged = min(missing, self._affordable(price, missing, budgets, delta) + 1)
        self._release(request, due, price, charged, recovered=True)
        return charged

    def charge(self, request: Charged, step: int, price: Events, count: int) -> None:
        """Write `count` messages that were released and that the ledger does not contain, whatever the budget."""
        self._release(request, step, price, count, recovered=True)

    def _affordable(self, price: Events, most: int, budgets: Budgets, delta: float) -> int:
        """The largest number of releases at this price that stays within the budgets, at most `most`."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.affords(price, budgets, delta, middle):
                low = middle
            else:
                high = middle
        return low

    def _release(self, request: Charged, step: int, price: Events, count: int, recovered: bool) -> None:
        if price["client"].rate != 1:
            raise UsageError(
                f"at client level every message counts in full, at a rate of 1, got {price['client'].rate:g}"
            )
        terms, record = request.privacy, price["record"]
        self._append(
            {
                "kind": "release",
                "run": request.run,
                "node": request.node,
                "step": step,
                "count": count,
                "unit": terms.unit,
                "trust": terms.trust,
                "noise": terms.noise,
                "sigma": terms.sigma,
                "client": price["client"].multiplier,
                "record": record.multiplier,
                **({"record_rate": record.rate} if record.rate < 1 else {}),
                "recovered": recovered,
            }
        )

    def _append(self, line: dict[str, Any]) -> None:
        self._chain.append(line)
        self._chain.lines.append(line)

    def close(self) -> None:
        self._chain.close()


def _event(line: dict[str, Any], unit: str, header: dict[str, Any]) -> Event:
    """The releases of a line, as the account that protects `unit` counts them.

    A ledger that was begun for one unit has one multiplier in a line, of a run without a clip per record: a client that
    is left out changes a message by b, and any other change of its data by 2b.
    """
    if "multiplier" not in line:
        return Event(line[unit], line.get("record_rate", 1.0) if unit == "record" else 1.0, line["count"])
    change = {"client": 1 if header["relation"] == "zero-out" else 2, "record": 2}
    return Event(line["multiplier"] * change[header["unit"]] / change[unit], 1.0, line["count"])


def _of(lines: list[dict[str, Any]], run: str | None, node: str | None) -> list[dict[str, Any]]:
    """The lines of one run and party; `run` may be the name of the run without its number."""
    runs = (line for line in lines if run in (None, line["run"], run_name(line["run"])))
    return [line for line in runs if node in (None, line["node"])]


def read_releases(folder: Path, witness: str | None = None) -> Releases:
    """Read a party's account without locking it; raises `UsageError` if the `witness` counts more lines."""
    path, known = folder / FILE, party_state.newest_ledger(folder)
    if not path.exists():
        if known is not None or (folder / MARK).exists():
            raise UsageError(f"{path} is missing, although the rest of the folder says that it was begun; {_CURE}")
        return Releases(path, [])
    try:
        return Releases(path, read_chain(path, known, witness=witness).lines)
    except LedgerDamaged as error:
        raise UsageError(f"{error}; {_CURE}") from None
