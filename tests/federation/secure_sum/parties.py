"""Parties of a secure sum in one process, whose contributors remember payments, vectors and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from normec.errors import BudgetSpent
from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.masks import Vector
from normec.federation.secure_sum.party import Assignment, Contribution, Contributor, Party
from normec.federation.secure_sum.roster import Member, Roster
from normec.federation.secure_sum.server import OpenedSum, Server, Stage
from normec.federation.secure_sum.terms import Terms, least_threshold
from normec.federation.secure_sum.wire import Answer, Request, decode_answers, decode_requests, encode

DIMENSION = 5
Filter = Callable[[int, Stage], bool]


@dataclass
class Ledger(Contributor):
    """A contributor with random vectors: `paid` and `made` outlive the party's process, like files."""

    number: int
    dimension: int = DIMENSION
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint32))
    budget: int = 10**6
    paid: list[int] = field(default_factory=list)
    made: dict[int, Vector] = field(default_factory=dict)
    counted: dict[int, bool] = field(default_factory=dict)
    recovered: list[tuple[list[int], tuple[int, bytes] | None]] = field(default_factory=list)
    deposits: bool = False
    vector: Vector | None = None

    def pay(self, assignment: Assignment) -> None:
        if len(self.paid) >= self.budget:
            raise BudgetSpent(assignment.round, 9.0, 8.0)
        self.paid.append(assignment.attempt)

    def contribute(self, assignment: Assignment) -> Contribution:
        assert self.paid[-1] == assignment.attempt, "noise is drawn after the payment"
        fresh = np.frombuffer(np.random.default_rng().bytes(self.dtype.itemsize * self.dimension), dtype=self.dtype)
        self.made[assignment.attempt] = fresh if self.vector is None else self.vector
        memory = f"memory before attempt {assignment.attempt:6}".encode() if self.deposits else b""
        return Contribution(self.made[assignment.attempt], memory)

    def settle(self, attempt: int, counted: bool) -> None:
        self.counted[attempt] = counted

    def recover(self, attempts: Sequence[int], deposited: tuple[int, bytes] | None) -> None:
        self.recovered.append((list(attempts), deposited))
        self.paid.extend(attempts)


def identities(parties: int) -> list[Identity]:
    return [Identity.generate() for _ in range(parties)]


def roster_of(keys: Iterable[Identity]) -> Roster:
    return Roster(tuple(Member(f"party-{number}", key.public) for number, key in enumerate(keys)))


def terms_of(roster: Roster, **changes: Any) -> Terms:
    n = len(roster)
    given: dict[str, Any] = {
        "run": "trial~0123456789abcdef",
        "roster": roster.digest.hex(),
        "parties": n,
        "threshold": least_threshold(n),
        "minimum": least_threshold(n),
        "colluding": 0,
        "sigma": 1.0,
        "step": 2.0**-20,
        "dimension": DIMENSION,
        "rounds": 100,
        "weights": (1.0,) * n,
        "method": "normec",
    }
    return Terms(**(given | changes))


class Federation:
    """A server and its parties. `folder` has a folder for each of them."""

    def __init__(self, folder: Path, parties: int, deposits: bool = False, **changes: Any) -> None:
        self.folder, self.keys = folder, identities(parties)
        self.roster = roster_of(self.keys)
        self.terms = terms_of(self.roster, **changes)
        size = self.terms.dimension
        self.ledgers = [Ledger(number, size, self.terms.dtype, deposits=deposits) for number in range(parties)]
        self.parties = [self.open(number) for number in range(parties)]
        self.server = Server(folder / "server", self.roster, self.terms)
        self.seen: dict[int, list[bytes]] = {number: [] for number in range(parties)}
        self.exchanges = 0
        self.opened: list[OpenedSum] = []

    def open(self, number: int, **options: Any) -> Party:
        return Party(
            self.folder / f"party-{number}", self.keys[number], self.roster, self.terms, self.ledgers[number], **options
        )

    def restart(self, number: int, **options: Any) -> None:
        self.parties[number].close()
        self.parties[number] = self.open(number, **options)

    def restart_server(self) -> None:
        self.server.close()
        self.server = Server(self.folder / "server", self.roster, self.terms)

    def exchange(self, party: int) -> None:
        """One request travels to a party, and its answer back."""
        answer = self.parties[party].answer(self.server.request(party))
        self.seen[party].append(answer)
        self.server.receive(party, answer)

    def stage(self, reaches: Filter = lambda *_: True) -> None:
        """One stage: everybody whom the messages reach is asked and answers, and the stage is closed."""
        self.exchanges += 1
        for party in self.server.addressees:
            if reaches(party, self.server.stage):
                self.exchange(party)
        self.server.advance()

    def until(self, stage: Stage, round: int = 0, payload: bytes = b"x") -> None:
        self.server.start(round, payload)
        while self.server.stage < stage:
            self.stage()

    def sum(self, round: int, payload: bytes = b"x", reaches: Filter = lambda *_: True) -> OpenedSum:
        """A whole attempt."""
        self.server.start(round, payload)
        while self.server.sum is None:
            self.stage(reaches)
        self.opened.append(self.server.sum)
        return self.server.sum

    def expected_survivors(self, attempt: int) -> tuple[int, ...]:
        """The parties in the opened sum of an attempt; nobody if it was not opened."""
        return next((made.survivors for made in self.opened if made.attempt == attempt), ())

    def expected(self, opened: OpenedSum) -> Vector:
        """The sum of what the survivors made, without any protocol."""
        made = [self.ledgers[party].made[opened.attempt].tolist() for party in opened.survivors]
        return np.array([sum(column) % 2**self.terms.modulus_bits for column in zip(*made, strict=True)], np.uint64)

    def check(self, opened: OpenedSum) -> None:
        np.testing.assert_array_equal(opened.values, self.expected(opened))

    def ask(self, party: int, *requests: Request) -> tuple[Answer, ...]:
        """What a party answers to requests that a server made up."""
        return decode_answers(self.parties[party].answer(encode(requests)))

    def request(self, party: int) -> tuple[Request, ...]:
        """What the server would send to a party now."""
        return decode_requests(self.server.request(party))
