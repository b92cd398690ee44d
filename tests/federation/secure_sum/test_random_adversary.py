"""A server with colluding parties that acts at random: it may restart honest parties and set their folders back.

In every attempt it follows the protocol in most messages and deviates in some: it leaves out keys, shows parties other
payloads, rounds, participants or histories, names survivors as it likes, and asks again in old attempts. What it could
open is then computed from all that honest parties have revealed, and compared with the promises of the secure sum.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from normec.federation.secure_sum.history import RECEIPT, SIGNED, Position, receipt_content, statement_of
from normec.federation.secure_sum.terms import least_threshold
from normec.federation.secure_sum.wire import (
    Advert,
    Certificate,
    Endorsement,
    Invitation,
    KeyList,
    MaskedVector,
    Quorum,
    Request,
    Reveal,
    SealedShares,
    Statement,
    Survivors,
    Task,
    encode,
)

from .parties import Federation

# Parties, colluding ones, and how many honest ones may be set back: c + f < 2t − n.
SIZES = [(3, 1, 0), (4, 1, 0), (4, 0, 1), (5, 2, 0), (5, 1, 1), (5, 0, 2), (7, 2, 0), (7, 1, 1)]
History = tuple[Certificate, ...]


@dataclass
class Known:
    """What the adversary has of one attempt."""

    adverts: dict[int, list[Advert]] = field(default_factory=lambda: defaultdict(list))
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    made: dict[int, tuple[Statement, MaskedVector]] = field(default_factory=dict)  # and what it was made for
    reveals: list[tuple[int, Statement, Reveal]] = field(default_factory=list)


class Adversary:
    """`old`: how many honest parties it may set back; `histories`: all chains of certificates that it has."""

    def __init__(self, folder: Path, draw: random.Random, parties: int, colluding: int, old: int) -> None:
        self.draw, self.folder, self.old, self.colluding = draw, folder, old, colluding
        minimum = max(least_threshold(parties), colluding + 2)
        self.federation = Federation(folder, parties, colluding=colluding, minimum=minimum)
        self.honest = range(parties - colluding)
        self.known: dict[int, Known] = defaultdict(Known)
        self.histories: list[History] = [()]
        self.copies: dict[int, list[tuple[Path, list[int]]]] = defaultdict(list)
        self.restored: set[int] = set()
        self.round = 0

    def sometimes(self, probability: float = 0.15) -> bool:
        return self.draw.random() < probability

    def ask(self, party: int, request: Request) -> Any:
        (answer,) = self.federation.ask(party, request)
        return answer

    def run(self, attempts: int) -> None:
        for attempt in range(attempts):
            for party in self.honest:
                self.disturb(party)
            number = self.draw.randrange(attempt + 1) if self.sometimes(0.1) else attempt
            known = self.known[number]
            self.exchange_keys(number, known)
            self.ask_for_vectors(number, known)
            for _ in range(self.draw.randint(1, 3)):
                if len(known.made) >= self.federation.terms.minimum:
                    self.ask_to_open(known)

    def disturb(self, party: int) -> None:
        """Restart a party, copy its folder and its ledger, or set both back to a copy."""
        federation, home = self.federation, self.folder / f"party-{party}"
        if self.sometimes(0.1):
            federation.restart(party)
        if self.sometimes(0.3):
            federation.parties[party].close()
            copy = self.folder / f"copy-{party}-{len(self.copies[party])}"
            shutil.copytree(home, copy)
            self.copies[party].append((copy, list(federation.ledgers[party].paid)))
            federation.parties[party] = federation.open(party)
        if self.copies[party] and len(self.restored | {party}) <= self.old and self.sometimes(0.3):
            federation.parties[party].close()
            copy, paid = self.draw.choice(self.copies[party])
            shutil.rmtree(home)
            shutil.copytree(copy, home)
            federation.ledgers[party].paid = list(paid)
            federation.parties[party] = federation.open(party)
            self.restored.add(party)

    def exchange_keys(self, number: int, known: Known) -> None:
        everyone = range(len(self.federation.keys))
        for party in everyone:
            advert = self.ask(party, Invitation(self.federation.terms.canonical, number))
            if isinstance(advert, Advert) and advert not in known.adverts[party]:
                known.adverts[party].append(advert)
        present = [party for party in everyone if known.adverts[party]]
        for party in present:
            shown = [
                known.adverts[other][-1] if other == party else self.draw.choice(known.adverts[other])
                for other in present
                if other == party or not self.sometimes(0.03)
            ]
            dealt = self.ask(party, KeyList(number, tuple(shown)))
            if isinstance(dealt, SealedShares):
                known.sealed[party] = dict(dealt.shares)

    def ask_for_vectors(self, number: int, known: Known) -> None:
        dealers, minimum = tuple(known.sealed), self.federation.terms.minimum
        if len(dealers) < minimum:
            return
        payload, history = self.draw.choice([b"x", b"y"]), max(self.histories, key=len)
        for party in dealers:
            participants = tuple(sorted(self.draw.sample(dealers, minimum))) if self.sometimes() else dealers
            task = Task(
                attempt=number,
                round=max(0, self.round + self.draw.choice([-1, 0, 1])) if self.sometimes() else self.round,
                payload=self.draw.choice([b"x", b"y"]) if self.sometimes() else payload,
                participants=participants,
                shares=tuple(
                    (other, known.sealed[other].get(party, bytes(48))) for other in participants if other != party
                ),
                history=self.draw.choice(self.histories) if self.sometimes() else history,
            )
            answer = self.ask(party, task)
            if isinstance(answer, MaskedVector) and party not in known.made:
                position, terms = self.federation.parties[party]._position, self.federation.terms.digest
                made_for = statement_of(terms, number, task.round, task.payload, participants, position)
                known.made[party] = made_for, answer

    def ask_to_open(self, known: Known) -> None:
        keys = self.federation.keys
        survivors = tuple(sorted(party for party in known.made if not self.sometimes(0.1)))
        statement = self.draw.choice([made_for for made_for, _ in known.made.values()])
        statement = msgspec.structs.replace(statement, survivors=survivors)
        receipts = tuple(
            known.made[party][1].receipt
            if party in self.honest
            else keys[party].sign(RECEIPT, receipt_content(statement))
            for party in survivors
        )
        signed = {party: keys[party].sign(SIGNED, encode(statement)) for party in survivors if party not in self.honest}
        for party in set(survivors) & set(self.honest):
            answer = self.ask(party, Survivors(statement, receipts))
            if isinstance(answer, Endorsement):
                signed[party] = answer.signature
        if len(signed) < self.federation.terms.threshold:
            return
        certificate = Certificate(statement, tuple(sorted(signed.items())))
        self.histories += [
            (*history, certificate)
            for history in self.histories
            if end_of(history) == (statement.count, statement.history)
        ]
        for party in set(survivors) & set(self.honest):
            answer = None if self.sometimes() else self.ask(party, Quorum(certificate))
            if isinstance(answer, Reveal):
                known.reveals.append((party, statement, answer))
        if statement.round == self.round and not self.sometimes(0.3):
            self.round += 1

    # ---- what it could open ----------------------------------------------------------------------------------------

    def check(self) -> int:
        """Compare what was revealed with the promises; returns the number of sums that could be opened."""
        opened = [statement for number in self.known for statement in self.opened_in(number)]
        assert len({statement.count for statement in opened}) == len(opened), "two histories"
        for party in self.restored:
            own = sorted((one for one in opened if party in one.survivors), key=lambda one: one.count)
            remembered = {attempt for attempt, _ in self.federation.parties[party]._known}
            for earlier, later in combinations(own, 2):
                if later.attempt in remembered:  # it entered a sum after its folder was set back
                    assert earlier.attempt in remembered
                    assert earlier.attempt in self.federation.ledgers[party].paid
        return len(opened)

    def opened_in(self, number: int) -> list[Statement]:
        known, terms = self.known[number], self.federation.terms
        found = {encode(statement): statement for _, statement, _ in known.reveals}
        assert len(found) <= 1, "an attempt was opened for two lists of survivors"
        needed = terms.threshold - self.colluding  # shares of honest parties; the adversary has those of its own
        for party in set(known.made) & set(self.honest):
            by_itself = any(by == party for by, _, _ in known.reveals)
            self_shares = {by for by, _, reveal in known.reveals if party in dict(reveal.self_shares)}
            key_shares = {by for by, _, reveal in known.reveals if party in dict(reveal.key_shares)}
            unmasked = by_itself or len(self_shares) >= needed
            assert not (unmasked and len(key_shares) >= needed), "both masks of a party are known"
            if unmasked:
                (statement,) = found.values()
                self.check_sum(party, statement, known)
        return list(found.values()) if len({by for by, _, _ in known.reveals}) >= needed else []

    def check_sum(self, party: int, statement: Statement, known: Known) -> None:
        honest = set(statement.survivors) & set(self.honest)
        assert party in honest
        assert len(honest) >= self.federation.terms.minimum - self.colluding
        for other in honest:
            made_for = msgspec.structs.replace(known.made[other][0], survivors=statement.survivors)
            assert made_for == statement, f"party {other} made its vector for something else"
            assert other in self.restored or statement.attempt in self.federation.ledgers[other].paid


def end_of(history: History) -> tuple[int, bytes]:
    position = Position()
    for certificate in history:
        position = position.after(certificate.statement)
    return position.count, position.digest


@pytest.mark.slow
@pytest.mark.parametrize(("parties", "colluding", "old"), SIZES)
def test_a_random_adversary_opens_nothing_but_what_is_promised(
    tmp_path: Path, parties: int, colluding: int, old: int
) -> None:
    opened = 0
    for trial in range(10):
        draw = random.Random(f"{parties} {colluding} {old} {trial}")
        adversary = Adversary(tmp_path / str(trial), draw, parties, colluding, old)
        adversary.run(draw.randint(2, 6))
        opened += adversary.check()
        adversary.federation.server.close()
        for party in adversary.federation.parties:
            party.close()
    assert opened  # otherwise nothing was tried
