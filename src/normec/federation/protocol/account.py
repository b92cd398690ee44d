"""A party's account: every message it ever made, over all runs, written down before it leaves.

One file for all runs, so that a new run cannot spend the same budget again. Formal guarantee as in `privacy.ledger`:
a message waits for `pay` to return, so what left is among the lines. ε is computed from the lines at the policy's δ;
the budget may be changed by the party, the unit and relation may not, for the multipliers rest on them. Messages of
runs without noise have lines of their own kind: no ε covers them, and they are counted all the same.

A party that lost its disk charges itself for what it may have made before (`recover`): as many as the server has
accepted, and one for each life that ended, for each may have had a message under way.

A ledger that knows less than the rest of the party's folder is refused: every state holds the ledger's head as it was,
and the file `MARK` says that a ledger was begun, whatever becomes of the states and the journal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...privacy.accounting import Account, Event
from ...privacy.chain import Chain, Head, LedgerDamaged, LedgerInUse, read_chain
from ...system.files import write_atomic
from . import party_state
from .wire import Request, run_name

FILE = "ledger.jsonl"
MARK = "ledger.begun"
_CURE = "restore the ledger from a copy, or begin an empty folder with what is left of the budget"


class Releases:
    """Verified lines, read: how many for whom, and what they amount to."""

    def __init__(self, path: Path, lines: list[dict[str, Any]]) -> None:
        self._path, self._header = path, lines[:1]
        self._lines = [line for line in lines[1:] if line["kind"] == "release"]
        self._bare = [line for line in lines[1:] if line["kind"] == "bare"]

    def check(self, unit: str, relation: str) -> None:
        """Raise `UsageError` where the account was begun for another unit or relation: its ε is not theirs."""
        wanted = {"kind": "header", "format": 1, "unit": unit, "relation": relation}
        for first in self._header:
            for name, value in wanted.items():
                if first.get(name) != value:
                    raise UsageError(
                        f"{self._path} was begun for {name} = {first.get(name)!r}, got {value!r}; "
                        "keep the policy's unit and relation, or begin another folder with what is left of the budget"
                    )

    def count(self, run: str | None = None, node: str | None = None) -> int:
        """Messages of one run, of all runs of a name, or of all."""
        return sum(line["count"] for line in _of(self._lines, run, node))

    def epsilon(self, delta: float, run: str | None = None, more: Event | None = None) -> float:
        events = [Event(line["multiplier"], 1.0, line["count"]) for line in _of(self._lines, run, None)]
        events += [more] if more is not None else []
        return Account(delta, events).epsilon() if events else 0.0

    def runs(self) -> list[str]:
        return sorted({line["run"] for line in self._lines + self._bare})

    def recovered(self) -> int:
        return sum(line["count"] for line in self._lines if line["recovered"])

    def bare(self, run: str | None = None) -> int:
        """Messages of runs without noise."""
        return len(_of(self._bare, run, None))

    def central(self) -> int:
        """Messages that left the party without noise, for a trusted server to add it."""
        return sum(line["count"] for line in self._lines if line.get("trust") == "central")

    def seeded(self) -> int:
        """Messages whose noise repeats, which protects nobody."""
        return sum(line["count"] for line in self._lines if line.get("noise") == "seeded")


class PartyAccount:
    """The account, open and locked until `close`."""

    def __init__(self, folder: Path, unit: str, relation: str, witness: str | None = None) -> None:
        try:
            self._chain = Chain(folder / FILE, party_state.newest_ledger(folder), witness=witness)
        except LedgerInUse as error:
            raise UsageError(str(error)) from None
        except LedgerDamaged as error:
            raise UsageError(f"{error}; {_CURE}") from None
        try:
            if not self._chain.lines:
                if (folder / MARK).exists():
                    raise UsageError(f"{folder / FILE} is empty, and {MARK} says that it was begun; {_CURE}")
                self._append({"kind": "header", "format": 1, "unit": unit, "relation": relation})
            if not (folder / MARK).exists():  # before the first payment
                write_atomic(folder / MARK, f"{FILE} was begun and must not be missing.\n", private=True)
            self.releases.check(unit, relation)
        except BaseException:
            self._chain.close()
            raise

    @property
    def releases(self) -> Releases:
        return Releases(self._chain.path, self._chain.lines)

    @property
    def head(self) -> Head:
        """How long the ledger is, and its last hash: for the states to remember."""
        return self._chain.head

    def affords(self, event: Event, epsilon: float, delta: float) -> bool:
        """Whether one more release stays within (epsilon, delta)."""
        return self.releases.epsilon(delta, more=event) <= epsilon

    def pay(self, request: Request, step: int, event: Event) -> None:
        """On return the line is on the disk; only now may anything be computed, and the message leave."""
        self._release(request, step, event, recovered=False)

    def note_bare(self, request: Request, step: int) -> None:
        """Write down a message of a run without noise; it may leave on return."""
        self._append({"kind": "bare", "run": request.run, "node": request.node, "step": step})

    def recover(self, request: Request, due: int, event: Event, epsilon: float, delta: float) -> int:
        """Bring this run's count up to `due`, which the server states. Returns how many releases were charged.

        The charge ends one release past the budget. The party then refuses everything, so that nothing is
        under-counted. A server that lies can cost a party its budget, as it could by asking for messages, but no more
        than that. Once the owner raises the budget, the rest is charged for as long as the claim stands.
        """
        missing = due - self.releases.count(request.run, request.node)
        if missing <= 0 or self.releases.epsilon(delta) > epsilon:
            return 0
        charged = min(missing, self._affordable(event, missing, epsilon, delta) + 1)
        self._release(request, due, Event(event.multiplier, event.rate, charged), recovered=True)
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

    def _release(self, request: Request, step: int, event: Event, recovered: bool) -> None:
        if event.rate != 1:
            raise UsageError("a party claims no gain from sampling")
        terms = request.privacy
        self._append(
            {
                "kind": "release",
                "run": request.run,
                "node": request.node,
                "step": step,
                "count": event.count,
                "trust": terms.trust,
                "noise": terms.noise,
                "sigma": terms.sigma,
                "multiplier": event.multiplier,
                "recovered": recovered,
            }
        )

    def _append(self, line: dict[str, Any]) -> None:
        self._chain.append(line)
        self._chain.lines.append(line)

    def close(self) -> None:
        self._chain.close()


def _of(lines: list[dict[str, Any]], run: str | None, node: str | None) -> list[dict[str, Any]]:
    """The lines of a run, which may also be given by its name alone."""
    runs = (line for line in lines if run in (None, line["run"], run_name(line["run"])))
    return [line for line in runs if node in (None, line["node"])]


def read_releases(folder: Path, witness: str | None = None) -> Releases:
    """What a party's account says, without a lock; raises `UsageError` where its `witness` knows more."""
    path, known = folder / FILE, party_state.newest_ledger(folder)
    if not path.exists():
        if known is not None or (folder / MARK).exists():
            raise UsageError(f"{path} is gone, and the rest of the folder says that it was begun; {_CURE}")
        return Releases(path, [])
    try:
        return Releases(path, read_chain(path, known, witness=witness).lines)
    except LedgerDamaged as error:
        raise UsageError(f"{error}; {_CURE}") from None
