"""The history of a run: a chain of certified statements, one for each sum that may have been opened.

A statement contains the digest of the chain before it, and t survivors signed it. Two claims make the chain useful;
n is the number of parties, t the threshold, c the number that collude with the server, and 2t − n > c.

Claim 1 (one list of survivors). An honest party signs one statement in an attempt. Two sets of t signers have at least
2t − n > c parties in common, so one honest: an attempt has at most one certificate.
Claim 2 (no second history). Whoever opens a sum has the reveals of at least t − c honest parties, each of which wrote
the certificate to its disk before it revealed anything, and signs only statements that continue it. The t signers of a
later statement without it would be among the other n − (t − c) < t parties, and there are not enough of them. So every
sum that was opened is part of the history of every later certificate.

A survivor is somebody who made a vector: each party signs a receipt with its vector, and honest parties sign only a
list whose receipts they have seen. Otherwise a server could name a party that was absent, which would then believe that
its folder is an old copy, refuse to go on, or charge its account for a vector that never left.

Claim 3 (the same for all). A receipt states what the vector was made for: the round, the payload, the participants and
the history. Only t of the survivors sign a statement, but each honest one of them compares the receipts of all
survivors with it. So every honest party whose vector is in an opened sum made it for the round, from the payload and
after the history of the statement, whether it signed or not.

A party whose folder is an old copy therefore meets its own number among the survivors of attempts that it does not
know, before its vector can enter another sum: a receipt of a shorter history fits no statement that the others sign.
Such a folder has forgotten certificates, so it counts like a colluding party in Claim 2: with f of them, 2t − n > c + f
is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from .keys import KEY, digest, signed_by
from .refusals import Refused
from .roster import Roster
from .terms import Terms
from .wire import Certificate, Statement, Survivors, encode, increasing

SIGNED, RECEIPT = "statement", "receipt"


@dataclass(frozen=True)
class Position:
    """The end of a history: the number of certified statements, the digest of their chain, and the last round."""

    count: int = 0
    digest: bytes = bytes(KEY)
    round: int = -1

    def after(self, statement: Statement) -> Position:
        """The position after one more statement, which must continue this one."""
        return Position(self.count + 1, digest("history", self.digest, encode(statement)), statement.round)

    def allows(self, round: int) -> bool:
        """Whether a round may be summed next: the one after the last, or the last again if it was not opened."""
        return round == self.round + 1 or (round == self.round and self.count > 0)


def check_statement(statement: Statement, terms: Terms, position: Position) -> None:
    """Check a statement against the terms and the history before it. Raises `Refused`."""
    if statement.terms != terms.digest:
        raise Refused("terms", "the statement belongs to other terms")
    if not (increasing(statement.participants, terms.parties) and increasing(statement.survivors, terms.parties)):
        raise Refused("survivors", "parties must be named once, in order, and be in the roster")
    if not set(statement.survivors) <= set(statement.participants):
        raise Refused("survivors", "somebody survived who did not take part")
    if len(statement.survivors) < terms.minimum:
        raise Refused("few", f"{len(statement.survivors)} survivors, the terms require {terms.minimum}")
    if (statement.count, statement.history) != (position.count, position.digest):
        raise Refused("history", f"statement {statement.count} does not continue the {position.count} known ones")
    if not position.allows(statement.round) or statement.round >= terms.rounds:
        raise Refused("round", f"round {statement.round} does not follow round {position.round}")


def payload_digest(payload: bytes) -> bytes:
    """The digest by which statements and receipts name a payload."""
    return digest("payload", payload)


def statement_of(
    terms: bytes, attempt: int, round: int, payload: bytes, participants: tuple[int, ...], position: Position
) -> Statement:
    """What an attempt is about, before its survivors are known; `terms` is the digest of the terms."""
    return statement_about(terms, attempt, round, payload_digest(payload), participants, position)


def statement_about(
    terms: bytes, attempt: int, round: int, payload: bytes, participants: tuple[int, ...], position: Position
) -> Statement:
    """As `statement_of`; `payload` is the digest of the payload."""
    return Statement(
        terms=terms,
        attempt=attempt,
        round=round,
        payload=payload,
        participants=participants,
        survivors=(),
        count=position.count,
        history=position.digest,
    )


def receipt_content(statement: Statement) -> bytes:
    """What a party signs when it has made a vector: all of the statement but its survivors, who are not known yet."""
    return digest(RECEIPT, encode(msgspec.structs.replace(statement, survivors=())))


def check_receipts(request: Survivors, roster: Roster) -> None:
    """Check that every survivor of a statement has signed that it made a vector for it. Raises `Refused`.

    The statement was checked before, so its survivors are in the roster.
    """
    statement = request.statement
    if len(request.receipts) != len(statement.survivors):
        raise Refused("survivors", f"{len(request.receipts)} receipts for {len(statement.survivors)} survivors")
    content = receipt_content(statement)
    for party, receipt in zip(statement.survivors, request.receipts, strict=True):
        if not signed_by(roster.members[party].key, RECEIPT, content, receipt):
            raise Refused("survivors", f"party {party} has not signed that it made a vector for this statement")


def check_certificate(certificate: Certificate, terms: Terms, roster: Roster, position: Position) -> None:
    """Check a statement and that t of its survivors signed it. Raises `Refused`."""
    statement = certificate.statement
    check_statement(statement, terms, position)
    signers = tuple(party for party, _ in certificate.signatures)
    if not increasing(signers, terms.parties) or not set(signers) <= set(statement.survivors):
        raise Refused("quorum", "signers must be survivors, named once and in order")
    if len(signers) < terms.threshold:
        raise Refused("quorum", f"{len(signers)} parties signed, the terms require {terms.threshold}")
    signed = encode(statement)
    for party, signature in certificate.signatures:
        if not signed_by(roster.members[party].key, SIGNED, signed, signature):
            raise Refused("quorum", f"the signature of party {party} is not its own")
