"""A party's account: every message that the party has made in any run, written down before it is sent.

All runs share one file, so that a new run cannot spend the same budget again. The formal guarantee is that of
`privacy.ledger`: a message is sent only after `pay` returns, so every message that was sent has a line. ε is computed
from the lines at the policy's δ. The party may change its budget, but not the unit and the relation, because the noise
multipliers depend on them. Messages of runs without noise have lines of another kind: they are counted, but no ε
covers them.

A party that lost its disk charges itself for all messages that it may have made before (`recover`): those that the
server accepted, and one for each earlier handshake, because a message may have been under way each time.

A ledger that is shorter than the rest of the party's folder implies is refused. Every state holds the head that the
ledger had when the state was written, and the file `MARK` records that a ledger was begun, even if the states and the
journal are lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...privacy.accounting import Account, Event
from ...privacy.hash_chain import Chain, Head, LedgerDamaged, LedgerInUse, read_chain
from ...system.files import write_atomic
from . import party_state
from .wire import Request, run_name

FILE = "ledger.jsonl"
MARK = "ledger.begun"
_CURE = "restore the ledger from a copy, or begin an empty folder with what is left of the budget"


class Releases:
    """The verified lines of an account: counts of messages, and their ε."""

    def __init__(self, path: Path, lines: list[dict[str, Any]]) -> None:
        self._path, self._header = path, lines[:1]
        self._lines = [line for line in lines[1:] if line["kind"] == "release"]
        self._without_noise = [line for line in lines[1:] if line["kind"] == "bare"]

    def check(self, unit: str, relation: str) -> None:
        """Raise `UsageError` if the account was begun for another unit or relation, for which its ε does not hold."""
        wanted = {"kind": "header", "format": 1, "unit": unit, "relation": relation}
        for first in self._header:
            for name, value in wanted.items():
                if first.get(name) != value:
                    raise UsageError(
                        f"{self._path} was begun for {name} = {first.get(name)!r}, got {value!r}; "
                        "keep the policy's unit and relation, or begin another folder with what is left of the budget"
                    )

    def count(self, run: str | None = None, node: str | None = None) -> int:
        """The number of messages of one run, of all runs with a name, or of all runs."""
        return sum(line["count"] for line in _of(self._lines, run, node))

    def epsilon(self, delta: float, run: str | None = None, more: Event | None = None) -> float:
        events = [Event(line["multiplier"], 1.0, line["count"]) for line in _of(self._lines, run, None)]
        events += [more] if more is not None else []
        return Account(delta, events).epsilon() if events else 0.0

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
                    raise UsageError(f"{folder / FILE} is empty, although {MARK} says that it was begun; {_CURE}")
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
        """The length of the ledger and its last hash, which states remember."""
        return self._chain.head

    def affords(self, event: Event, epsilon: float, delta: float) -> bool:
        """Whether one more release stays within (epsilon, delta)."""
        return self.releases.epsilon(delta, more=event) <= epsilon

    def pay(self, request: Request, step: int, event: Event) -> None:
        """Write the line of a message to the disk. Only after this returns may the message be computed and sent."""
        self._release(request, step, event, recovered=False)

    def note_without_noise(self, request: Request, step: int) -> None:
        """Write the line of a message of a run without noise; the message may be sent after this returns."""
        self._append({"kind": "bare", "run": request.run, "node": request.node, "step": step})

    def recover(self, request: Request, due: int, event: Event, epsilon: float, delta: float) -> int:
        """Bring this run's count up to `due`, a number that the server states. Returns how many releases were charged.

        The charge stops one release past the budget. The party then refuses everything, so nothing is under-counted. A
        server that lies can cost a party its budget, as it could by asking for messages, but no more than that. If the
        owner raises the budget, the rest is charged as long as the server repeats its claim.
        """
        missing = due - self.releases.count(request.run, request.node)
        if missing <= 0 or self.releases.epsilon(delta) > epsilon:
            return 0
        charged = min(missing, self._affordable(event, missing, epsilon, delta) + 1)
        self._release(request, due, Event(event.multiplier, event.rate, charged), recovered=True)
        return charged

    def _affordable(self, event: Event, most: int, epsilon: float, delta: float) -> int:
        """The largest number of releases like `event` that stays within the budget, at most `most`."""
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
