"""The ledger of a run: every release is written down before it is made, and no release exceeds the budget.

Formal guarantee. If every release waits for `spend` to return and uses the noise of the `attempt` that the receipt
names, then at any time, over all crashes and restarts, the file contains all releases that were made, and their ε, by
`accounting`, is within the budget.

- `spend` appends and syncs first (`hash_chain`). A run that is killed between the payment and the release has paid for
  nothing: releases are over-counted, never under-counted.
- Same release, same price. With `key` the caller names a release that would come out bit for bit the same if made
  again (seeded noise, same seed, same configuration, same machine, deterministic arithmetic: hash them into the key,
  never the data). A second `spend` of that round with that key adds nothing. Without a key (secure noise is drawn
  afresh) or with another key the round counts again and gets the next `attempt`, which belongs in the noise's path, so
  that one draw never covers two messages. A round that counts again may lead elsewhere: what was paid before for it and
  for all later rounds is then no longer the same release, and its keys are void.
- A round has one set of coins, however often it is released. Only its first release has fresh coins and gains from
  sampling. A further one is, given what was seen before, a mixture of taking part and of not taking part, which a
  release of a unit that takes part dominates: it counts at rate 1.
- Groups that take turns share a payment (rule P1). With `groups` G, no unit takes part in two of the rounds cG … cG + G
  − 1, so the first release of any of them pays for the first releases of all that cost no more: a line says how many
  releases it charges. A round that is released again is charged in full, whatever its group. So for every unit the file
  charges at least the releases that it took part in.
- `reserve` pays for many rounds with one line, before they are made. With a key, a resumed run goes on inside its
  reservation; without, the allowance lives in the process that made it, and what a crash leaves of it is lost, not
  returned.
- One process spends. A forked child and an unpickled copy are refused; threads of the process take turns.
- "Over all crashes and restarts" assumes that the file is not rolled back. A ledger that is restored together with its
  head to an older state (a backup, a snapshot of the disk, a deleted folder) has lost releases, and nothing in its
  folder can show it. Use a `witness`, a path outside the folder that no backup restores together with it: then a ledger
  with fewer lines than its witness is refused (`hash_chain` lists the changes that are detected).
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from ..errors import BudgetSpent, UsageError, at_least, positive
from .accounting import Account, Event
from .hash_chain import Chain, Head, LedgerDamaged, LedgerInUse
from .statement import Privacy

AMENDMENT = "amendment"  # the kind of a line with a new statement, whose ε is larger

__all__ = ["Head", "Ledger", "LedgerDamaged", "LedgerInUse", "Receipt"]


def affordable(account: Account, event: Event, privacy: Privacy, horizon: int, round: int) -> tuple[Account, float]:
    """The account with `event`, and a bound on its ε that is within the budget. Raises `BudgetSpent`."""
    after = account.copy()
    after.add(event)
    epsilon = after.upper(horizon)
    if epsilon > privacy.budget:
        epsilon = after.epsilon()
        if epsilon > privacy.budget:
            raise BudgetSpent(round, epsilon, privacy.budget, account.releases)
    return after, epsilon


def without_used_coins(event: Event, attempt: int) -> Event:
    """What a round's release number `attempt` counts as: its coins are the first one's, and no longer fresh."""
    return dataclasses.replace(event, rate=1.0) if attempt else event


def charged_releases(rounds: range, attempt: int, groups: int, paid: Container[int]) -> int:
    """How many releases are charged for release number `attempt` of some rounds, if `groups` take turns.

    Args:
        rounds: The rounds.
        attempt: 0 for first releases; all others are charged in full.
        groups: The number of groups that take turns.
        paid: The cycles of that many rounds of which a first release was charged before.

    Example:
        >>> charged_releases(range(3, 9), attempt=0, groups=4, paid={0}), charged_releases(range(3, 9), 1, 4, {0})
        (2, 6)
    """
    if attempt or groups == 1:
        return len(rounds)
    return sum(cycle not in paid for cycle in {round // groups for round in rounds})


def dearer(event: Event, paid: Event) -> bool:
    """Whether a release costs more than the one that was paid for."""
    return event.multiplier < paid.multiplier * (1 - 1e-9) or event.rate > paid.rate


def charged_events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """What the lines of a ledger charge; the first releases of a cycle that is paid for add nothing."""
    counted = [(line, line.get("charged", line["count"])) for line in lines]
    return [Event(line["multiplier"], line["rate"], charged) for line, charged in counted if charged != 0]


@dataclass(frozen=True)
class Receipt:
    """The permission to make a release.

    Args:
        round: The round that was paid for.
        attempt: The number of the attempt; it is part of the name of the noise.
        fresh: Whether a line was written for it just now.
        epsilon: The ε of all releases so far, this one included.
        releases: The number of all releases so far.

    Example:
        >>> Receipt(round=3, attempt=0, fresh=True, epsilon=0.8, releases=4).attempt
        0
    """

    round: int
    attempt: int
    fresh: bool
    epsilon: float
    releases: int


@dataclass(frozen=True)
class Payments:
    """What a run without a folder paid, from which a ledger can be written later.

    Args:
        privacy: The statement of the run.
        horizon: The planned number of releases that are charged.
        planned: All releases of a run whose noise changes by round.
        made: The round, the event and the noise of every release, in order.
        groups: The number of groups of clients that take turns.
    """

    privacy: Privacy
    horizon: int
    planned: tuple[Event, ...]
    made: tuple[tuple[int, Event, float], ...]
    groups: int = 1

    def write(self, path: Path) -> None:
        """Write the ledger; rounds that follow each other with the same noise share a line."""
        with Ledger(path, self.privacy, self.horizon, planned=self.planned, groups=self.groups) as ledger:
            waiting: tuple[int, Event, float] | None = None
            latest, repeats = -1, False  # the latest round so far; whether the round that waits was released before
            for round, event, sigma in self.made:
                again = self.groups > 1 and round <= latest  # cycles are charged for first releases only
                latest = max(latest, round)
                if waiting is not None:
                    first, whole, noise = waiting
                    one = dataclasses.replace(whole, count=1)
                    follows = (one, noise, first + whole.count) == (event, sigma, round)
                    if follows and not (again or repeats):
                        waiting = first, dataclasses.replace(whole, count=whole.count + 1), noise
                        continue
                    ledger.reserve(*waiting)
                waiting, repeats = (round, event, sigma), again
            if waiting is not None:
                ledger.reserve(*waiting)


class _Paid(NamedTuple):
    """The payment for a round: the attempt, the noise, and the price."""

    attempt: int
    sigma: float
    event: Event


class Ledger:
    """An open and locked ledger.

    Args:
        path: The ledger's file; `path.head` next to it holds the number of lines and the last hash.
        privacy: The statement; a file that was opened for another one is refused.
        horizon: The planned number of releases that are charged (see `Account.upper`).
        expect: The head in a checkpoint; a ledger that is shorter is refused.
        secret: A key for the hashes, so that nobody without it can write a ledger that verifies.
        witness: A file in another folder that also counts the lines, so that a ledger which was restored to an older
            state, or deleted, is refused. To begin one for an existing ledger, copy `path.head` to it.
        planned: All releases of a run whose noise changes by round (see `Account.upper`).
        amend: Whether the statement may have a larger ε than the file was opened for; a line notes the new one.
        groups: The number of groups of clients that take turns; a file that was opened for another one is refused.

    Raises:
        LedgerDamaged: The file was changed, cut, or set back.
        LedgerInUse: Another process holds the file.
        UsageError: The file belongs to another statement, or the witness lies in the ledger's folder or below it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Ledger(Path(folder) / "ledger.jsonl", Privacy(epsilon=8), horizon=10) as ledger:
        ...         receipt = ledger.spend(0, Event(multiplier=4.0), sigma=4.0)
        >>> receipt.attempt, receipt.releases, round(receipt.epsilon, 3)
        (0, 1, 0.926)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        privacy: Privacy,
        horizon: int,
        expect: Head | None = None,
        secret: bytes | None = None,
        witness: str | os.PathLike[str] | None = None,
        planned: Iterable[Event] = (),
        amend: bool = False,
        groups: int = 1,
    ) -> None:
        at_least(1, horizon=horizon, groups=groups)
        self._amend = amend
        self.groups, self.releases = groups, 0
        self.privacy, self.horizon = privacy, horizon
        self._account = Account(privacy.delta, planned=planned)
        self._attempts: dict[int, int] = {}  # round → attempts so far
        self._paid: set[tuple[int, int]] = set()  # (round, attempt)
        self._cycles: dict[int, Event] = {}  # what was paid for the first releases of a cycle of `groups` rounds
        self._keys: dict[tuple[int, str], _Paid] = {}  # by round and key
        self._last_key = -1  # the latest round that was paid for with a key
        self._allowance: dict[int, _Paid] = {}  # reserved without a key, in this process
        self._epsilons: dict[int, float] = {}  # round → epsilon of the last line that paid for it
        self.epsilon = 0.0
        self._turn = threading.Lock()
        self._chain = Chain(path, expect, secret, witness)
        try:
            self._resume()
        except BaseException:
            self._chain.close()
            raise

    @property
    def path(self) -> Path:
        return self._chain.path

    @property
    def head(self) -> Head:
        """The head for a checkpoint; pass it as `expect` when the ledger is opened again."""
        return self._chain.head

    def account(self) -> Account:
        """A copy of the account of all releases in the file."""
        return self._account.copy()

    def exact_epsilon(self) -> float:
        """The exact ε of the ledger, without the rounding of `epsilon` between checkpoints."""
        return self._account.tightest(self.horizon) if self.releases else 0.0

    def epsilon_at(self, round: int) -> float:
        """ε up to the last line that paid for `round`, or of the whole ledger if there is none.

        It does not depend on later lines, so a resumed run gets the same value as before.
        """
        return self._epsilons.get(round, self.epsilon)

    def has_paid(self, round: int, attempt: int) -> bool:
        """Whether a line pays for this attempt of `round`."""
        return (round, attempt) in self._paid

    def next_attempt(self, round: int, key: str | None) -> int | None:
        """The attempt that `spend` would pay for next; None if it would add nothing."""
        if (round, key) in self._keys if key is not None else round in self._allowance:
            return None
        return self._attempts.get(round, 0)

    @property
    def cycles(self) -> set[int]:
        """The cycles of `groups` rounds whose first releases are paid for."""
        return set(self._cycles)

    def spend(self, round: int, event: Event, sigma: float, key: str | None = None) -> Receipt:
        """Pay for the release of `round`. Raises `BudgetSpent` if the budget does not allow it."""
        at_least(0, round=round)
        if event.count != 1:
            raise UsageError(f"spend pays for one round, got {event.count}; use reserve")
        self._check_key(key)
        self._chain.refuse_other_processes()
        with self._turn:
            found = self._allowance.pop(round, None) if key is None else self._keys.get((round, key))
            if found is None:
                return self._write(round, event, sigma, key)
            return self._known(round, found, event, sigma)

    def reserve(self, first: int, event: Event, sigma: float, key: str | None = None) -> Receipt:
        """Pay for the rounds first .. first + event.count − 1 with one line; `spend` of each then adds nothing."""
        at_least(0, first=first)
        self._check_key(key)
        self._chain.refuse_other_processes()
        rounds = range(first, first + event.count)
        with self._turn:
            if key is not None and all((round, key) in self._keys for round in rounds):
                receipts = [self._known(round, self._keys[round, key], event, sigma) for round in rounds]
                return receipts[0]
            receipt = self._write(first, event, sigma, key)
            if key is None:
                paid = _Paid(receipt.attempt, sigma, without_used_coins(event, receipt.attempt))
                self._allowance.update((round, paid) for round in rounds)
            return receipt

    def close(self) -> None:
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        self._chain.__reduce__()

    def _check_key(self, key: str | None) -> None:
        if key is not None and self.privacy.noise != "seeded":
            kind = self.privacy.noise or "secure"
            raise UsageError(f"noise={kind!r} is never the same twice; spend without a key")

    def _known(self, round: int, found: _Paid, event: Event, sigma: float) -> Receipt:
        """The receipt of a release that was paid for before, if `event` costs no more."""
        if found.sigma != sigma:
            raise UsageError(f"round {round} was paid for with sigma = {found.sigma:g}, got {sigma:g}; use another key")
        paid = found.event
        if dearer(event, paid):
            raise UsageError(
                f"round {round} was paid for with multiplier {paid.multiplier:g} and rate {paid.rate:g}, got "
                f"{event.multiplier:g} and {event.rate:g}; spend without a key, as another release"
            )
        return Receipt(round, found.attempt, False, self.epsilon, self.releases)

    def _write(self, first: int, event: Event, sigma: float, key: str | None) -> Receipt:
        positive(sigma=sigma)
        attempt = max(self._attempts.get(round, 0) for round in range(first, first + event.count))
        event = without_used_coins(event, attempt)
        rounds = range(first, first + event.count)
        charged = charged_releases(rounds, attempt, self.groups, self._covered(rounds, event))
        after, epsilon = self._account.copy(), self.epsilon
        if charged:
            due = dataclasses.replace(event, count=charged)
            after, epsilon = affordable(self._account, due, self.privacy, self.horizon, first)
        if not math.isfinite(epsilon):
            raise UsageError(f"sigma = {sigma:g} gives no privacy: epsilon is infinite; raise sigma")
        epsilon = max(epsilon, self.epsilon)  # an exact value may follow a rounded-up one
        line: dict[str, Any] = {
            "kind": "release",
            "round": first,
            "count": event.count,
            "attempt": attempt,
            "key": key,
            "sigma": sigma,
            "multiplier": event.multiplier,
            "rate": event.rate,
            "releases": self.releases + event.count,
            "epsilon": epsilon,
        }
        if self.groups > 1:
            line["charged"] = charged
        self._chain.append(line)
        self._take(line, after)
        return Receipt(first, attempt, True, epsilon, self.releases)

    def _covered(self, rounds: range, event: Event) -> set[int]:
        """The cycles of some rounds whose payment covers a first release that costs as much as `event`."""
        cycles = {round // self.groups for round in rounds} if self.groups > 1 else set()
        return {cycle for cycle in cycles & self._cycles.keys() if not dearer(event, self._cycles[cycle])}

    def _take(self, line: dict[str, Any], account: Account) -> None:
        self._account, self.epsilon, self.releases = account, line["epsilon"], line["releases"]
        if line["round"] <= self._last_key:
            self._keys = {known: paid for known, paid in self._keys.items() if known[0] < line["round"]}
        event = Event(line["multiplier"], line["rate"])
        rounds = range(line["round"], line["round"] + line["count"])
        covered = self._covered(rounds, event)
        for round in rounds:
            self._attempts[round] = line["attempt"] + 1
            if round // self.groups not in covered:
                self._cycles[round // self.groups] = event
            self._paid.add((round, line["attempt"]))
            self._epsilons[round] = line["epsilon"]
            if line["key"] is not None:
                self._keys[round, line["key"]] = _Paid(line["attempt"], line["sigma"], event)
                self._last_key = max(self._last_key, round)

    def _resume(self) -> None:
        header = {"kind": "header", "format": 1, "privacy": self.privacy.to_dict()}
        if self.groups > 1:
            header["groups"] = self.groups
        if not self._chain.lines:
            self._chain.append(header)
            return
        first, *rest = self._chain.lines
        if first.get("kind") != "header" or first.get("format") != 1:
            raise LedgerDamaged(f"{self._chain.path} does not begin with a ledger's header")
        if first.get("groups", 1) != self.groups:
            raise UsageError(
                f"{self._chain.path} was opened for {first.get('groups', 1)} groups of clients, got {self.groups};"
                " keep the number of groups or start another ledger"
            )
        stated = [first["privacy"], *(line["privacy"] for line in rest if line["kind"] == AMENDMENT)][-1]
        changed = self.privacy.difference(stated)
        grown = changed is not None and changed[0] == "epsilon" and None not in changed and changed[1] < changed[2]
        if amended := self._amend and grown:  # nothing else may change together with ε
            changed = self.privacy.difference({**stated, "epsilon": self.privacy.epsilon})
        if changed is not None:
            name, before, now = changed
            raise UsageError(
                f"{self._chain.path} was opened for {name} = {before!r}, got {now!r};"
                " keep the statement or start another ledger"
            )
        for line in rest:
            if line["kind"] != AMENDMENT:
                for event in charged_events([line]):
                    self._account.add(event)
                self._take(line, self._account)
        if amended:
            self._chain.append({"kind": AMENDMENT, "privacy": self.privacy.to_dict()})
