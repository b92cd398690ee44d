"""A party's account: every noisy message it ever made, over all runs, paid for before it leaves.

One file for all runs, so that a new run cannot spend the same budget again. Formal guarantee as in `privacy.ledger`:
a message waits for `pay` to return, so what left is among the lines. ε is computed from the lines at the policy's δ;
the budget may be changed by the party, the unit and relation may not, for the multipliers rest on them.

A party that lost its disk charges itself for what it may have made before (`recover`): as many as the server has
accepted, and one for each life that ended, for each may have had a message under way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..privacy.accounting import Account, Event
from ..privacy.chain import Chain, LedgerDamaged, LedgerInUse, read_chain

FILE = "ledger.jsonl"
_ROUNDING = 1e-9  # relative: what summing many μ² may add by rounding


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
        try:
            self._chain = Chain(folder / FILE)
        except (LedgerDamaged, LedgerInUse) as error:
            raise UsageError(str(error)) from None
        try:
            self._begin({"kind": "header", "format": 1, "unit": unit, "relation": relation})
        except BaseException:
            self._chain.close()
            raise

    @property
    def releases(self) -> Releases:
        return Releases(self._chain.lines)

    def affords(self, event: Event, epsilon: float, delta: float) -> bool:
        """Whether one more release stays within (epsilon, delta)."""
        return self.releases.epsilon(delta, more=event) <= epsilon * (1 + _ROUNDING)

    def pay(self, run: str, node: str, step: int, event: Event, sigma: float) -> None:
        """On return the line is on the disk; only now may the message leave."""
        self._append(run, node, step, event, sigma, recovered=False)

    def recover(self, run: str, node: str, due: int, event: Event, sigma: float) -> int:
        """Bring this run's count up to `due`; past releases are charged whatever the budget. Returns how many."""
        missing = due - self.releases.count(run, node)
        if missing <= 0:
            return 0
        many = Event(event.multiplier, event.rate, missing)
        self._append(run, node, due, many, sigma, recovered=True)
        return missing

    def _append(self, run: str, node: str, step: int, event: Event, sigma: float, recovered: bool) -> None:
        if event.rate != 1:
            raise UsageError("a party claims no gain from sampling")
        line = {"kind": "release", "run": run, "node": node, "step": step, "count": event.count, "sigma": sigma}
        line |= {"multiplier": event.multiplier, "recovered": recovered}
        self._chain.append(line)
        self._chain.lines.append(line)

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
    path = folder / FILE
    if not path.exists():
        return Releases([])
    try:
        return Releases(read_chain(path).lines)
    except LedgerDamaged as error:
        raise UsageError(str(error)) from None
