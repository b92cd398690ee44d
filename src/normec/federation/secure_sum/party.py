"""A party of a secure sum: it answers each step of an attempt once, and refuses whatever does not fit.

The secrets of an attempt (its key pairs, the seed of its self mask, the shares that others sealed for it) exist only in
the memory of this process. The vector with its noise is made for one attempt and masked with these secrets. So after a
restart, in a forked process, or in a folder that was restored from a backup, no message of an earlier attempt can be
made again: the party answers an attempt from the process in which it began, with the same bytes each time, or not at
all. The others then treat it as a dropout.

The folder holds a hash chain (`privacy/hash_chain.py`) of what the party did, written before anything is sent:

| line | written before | so that |
| --- | --- | --- |
| keys | keys are advertised | no attempt is begun twice |
| input | the noise and the vector, after the payment | the party knows which sums contain vectors that it paid for |
| certified | shares are revealed | the party signs only what continues this history |

The order for a vector is: check everything, pay, write the line, compute with noise, mask, send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import msgspec

from ...errors import BudgetSpent, UsageError
from ...privacy.hash_chain import Chain, LedgerDamaged, read_chain
from ...system.files import private_folder
from . import deposit
from .history import (
    RECEIPT,
    SIGNED,
    Position,
    check_certificate,
    check_receipts,
    check_statement,
    payload_digest,
    receipt_content,
    statement_about,
)
from .keys import (
    SEED,
    Identity,
    KeyPair,
    commitment,
    derive,
    digest,
    new_seed,
    seal_once,
    signed_by,
    unseal_once,
)
from .masks import Vector, add_mask, add_pair_mask, pair_key, self_key
from .refusals import Refused
from .roster import Roster
from .shares import split
from .terms import Terms
from .wire import (
    Advert,
    Answer,
    Certificate,
    Endorsement,
    Invitation,
    KeyList,
    MaskedVector,
    Quorum,
    Refusal,
    Request,
    Reveal,
    SealedShares,
    Survivors,
    Task,
    attempt_of,
    decode_requests,
    encode,
    increasing,
    largest_content,
)

FILE = "secure-sum.jsonl"


@dataclass(frozen=True)
class Assignment:
    """What a party computes: the round, the attempt, and the server's payload."""

    round: int
    attempt: int
    payload: bytes


@dataclass(frozen=True, eq=False)
class Contribution:
    """A party's vector on the grid with its noise, modulo 2^32 or 2^64, and what it deposits (may be empty)."""

    vector: Vector
    deposit: bytes = b""


class Contributor(Protocol):
    """The part of a party that has data, a memory and a ledger. Any function may raise `Refused`.

    The calls for one attempt come in this order: `settle` for the attempt before, `pay`, `contribute`.
    """

    def pay(self, assignment: Assignment) -> None:
        """Write the release to the ledger and sync it, or raise `BudgetSpent`. Called once for each attempt."""

    def contribute(self, assignment: Assignment) -> Contribution:
        """The vector with fresh noise. A failure that depends on the data must send noise alone instead of raising."""

    def settle(self, attempt: int, counted: bool) -> None:
        """Update the memory: the vector of an attempt is part of an opened sum, or never will be.

        The call also comes for an attempt whose vector could not be made, and after a crash it may come twice.
        """

    def recover(self, attempts: Sequence[int], deposited: tuple[int, bytes] | None) -> None:
        """Charge the ledger for vectors that were summed and that the folder does not know, and restore the memory.

        `deposited` is the attempt and the content of the newest deposit; None if the server has none. `settle` for the
        newest attempt follows. After a crash the call may come twice: the account is then too high, never too low.
        """


class _Secrets(NamedTuple):
    """What two parties share in an attempt: a secret for sealing shares, and one for their mask."""

    sealing: bytes
    masking: bytes


@dataclass
class _Attempt:
    """The secrets and the answers of one attempt."""

    number: int
    seed: bytes
    key_seed: bytes
    encryption: KeyPair
    masking: KeyPair
    advert: Advert
    secrets: dict[int, _Secrets] = field(default_factory=dict)  # by the other party
    keys_digest: bytes = b""
    sealed: SealedShares | None = None
    task_digest: bytes = b""
    payload_digest: bytes = b""
    task: Task | None = None
    masked: MaskedVector | None = None
    statement: bytes = b""
    endorsement: Endorsement | None = None
    reveal: Reveal | None = None


@dataclass
class _Entered:
    """The last attempt for which a vector was made, and what is known about its outcome."""

    attempt: int = -1
    certified_round: int | None = None  # of the certificate that contains the vector
    opened: bool | None = None  # known when the next certificate or the next task names its round


class Party:
    """A party that keeps its record in `folder`, which no other process uses at the same time.

    Args:
        folder: The folder of this party in this run.
        identity: The party's long-term key.
        roster: The parties of the run, as this party pinned them.
        terms: The terms that this party agreed to.
        contributor: The part with the data, the memory and the ledger.
        accept_loss: Continue although the folder was lost or is an old copy: unknown vectors are charged
            (`Contributor.recover`) instead of refused. It may change later.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Identity,
        roster: Roster,
        terms: Terms,
        contributor: Contributor,
        *,
        accept_loss: bool = False,
    ) -> None:
        terms.check_roster(roster)
        self.number = roster.number(identity.public)
        self._identity, self._roster, self._terms, self._contributor = identity, roster, terms, contributor
        self._digest, self.accept_loss = terms.digest, accept_loss
        self._attempts: dict[int, _Attempt] = {}
        self._one_at_a_time = threading.Lock()
        self._floor, self._entered, self._position = -1, _Entered(), Position()
        # Attempts for which this party made a vector, or whose loss it has accepted, with digests of what it was made
        # for: the server chooses the numbers of attempts, and may give that of a forgotten one to another task.
        self._known: set[tuple[int, str]] = set()
        private_folder(Path(folder))
        self._record = Chain(Path(folder) / FILE)
        try:
            self._replay()
        except BaseException:
            self._record.close()
            raise

    def _replay(self) -> None:
        """Take the state from the record."""
        if not self._record.lines:
            self._record.append({"event": "begun", "terms": self._digest.hex()})
            return
        begun = self._record.lines[0]
        if begun.get("terms") != self._digest.hex():
            raise UsageError(f"{self._record.path} belongs to a run with other terms; use another folder for this run")
        for line in self._record.lines[1:]:
            event = line["event"]
            if event == "keys":
                self._floor = line["attempt"]
            elif event == "input":
                self._known.add((line["attempt"], line["made_for"]))
                self._entered = _Entered(line["attempt"])
            elif event == "recovered":
                self._known.update((attempt, made_for) for attempt, made_for in line["accepted"])
                self._entered = _Entered(line["attempt"])
            elif event == "certified":
                self._note_certified(line["attempt"], line["round"], line["mine"])
                self._position = Position(line["count"], bytes.fromhex(line["history"]), line["round"])

    def close(self) -> None:
        """Forget all secrets and release the folder."""
        self._attempts.clear()
        self._record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether the record can be written. After a write that failed, the party must be opened again."""
        return self._record.usable

    def answer(self, data: bytes) -> bytes:
        """The answer to an exchange; a request that is refused is answered with one of a few fixed reasons."""
        try:
            requests = decode_requests(data)
        except Refused as refused:
            return encode((_refusal(0, refused),))
        return encode(self.answers(requests))

    def answers(self, requests: Sequence[Request]) -> tuple[Answer, ...]:
        """The answers to requests that were read already."""
        with self._one_at_a_time:  # two threads must not make two vectors for one task
            return tuple(self._answered(request) for request in requests)

    def _answered(self, request: Request) -> Answer:
        try:
            self._record.refuse_other_processes()  # a forked process has a copy of the secrets
            return self._answer(request)
        except Refused as refused:
            return _refusal(attempt_of(request), refused)
        except BudgetSpent as spent:
            return _refusal(attempt_of(request), Refused("budget", str(spent)))
        except Exception as error:  # a full disk, or an error in the party's own code; the server gets no details
            return _refusal(attempt_of(request), Refused("failed", f"{type(error).__name__}: {error}"))

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, Invitation):
            return self._advertise(request)
        number = attempt_of(request)
        if number < self._entered.attempt:
            raise Refused("late", f"attempt {number}, after a vector for attempt {self._entered.attempt}")
        attempt = self._attempts.get(number)
        if attempt is None:
            raise Refused("forgotten" if number <= self._floor else "order", f"no keys of attempt {number} are here")
        if isinstance(request, KeyList):
            return self._share(request, attempt)
        if isinstance(request, Task):
            return self._mask(request, attempt)
        if isinstance(request, Survivors):
            return self._endorse(request, attempt)
        return self._reveal(request, attempt)

    def _forget_all_but(self, number: int) -> None:
        """Keep the secrets of one attempt only; this party can no longer help to open another."""
        self._attempts = {kept: attempt for kept, attempt in self._attempts.items() if kept == number}

    # ---- keys and shares -------------------------------------------------------------------------------------------

    def _advertise(self, request: Invitation) -> Advert:
        self._check_terms(request.terms)
        number = request.attempt
        known = self._attempts.get(number)
        if known is not None:
            return known.advert
        if number <= self._floor:
            raise Refused("late", f"attempt {number}, after keys for attempt {self._floor}")
        if number >= self._terms.most_attempts:
            raise Refused("late", f"attempt {number}; the terms allow {self._terms.most_attempts}")
        self._record.append({"event": "keys", "attempt": number})
        self._floor = number
        self._forget_all_but(self._entered.attempt)
        seed, key_seed = new_seed(), new_seed()
        encryption = KeyPair(new_seed() + new_seed())
        masking = KeyPair.from_seed(key_seed, self._digest, number, self.number)
        advert = Advert(
            party=self.number,
            attempt=number,
            terms=self._digest,
            encryption_key=encryption.public,
            mask_key=masking.public,
            commitment=commitment(seed, self._digest, number, self.number),
            count=self._position.count,
            entered=self._entered.attempt + 1,
        )
        advert = msgspec.structs.replace(advert, signature=self._identity.sign("advert", advert.signed_bytes))
        self._attempts[number] = _Attempt(number, seed, key_seed, encryption, masking, advert)
        return advert

    def _check_terms(self, shown: bytes) -> None:
        if shown == self._terms.canonical:
            return
        try:
            differs = self._terms.first_difference(Terms.read(shown))
        except (UsageError, TypeError) as error:
            raise Refused("terms", f"the server's terms are not valid: {error}") from None
        raise Refused("terms", f"the server's terms differ from the agreed ones in {differs or 'their spelling'}")

    def _share(self, request: KeyList, attempt: _Attempt) -> SealedShares:
        shown = digest("keys", encode(request))
        if attempt.sealed is not None:
            if shown != attempt.keys_digest:
                raise Refused("repeated", "another list of keys was answered in this attempt")
            return attempt.sealed
        adverts = {advert.party: advert for advert in request.adverts}
        self._check_adverts(request, adverts, attempt)
        secrets = {party: _agreed(attempt, advert) for party, advert in adverts.items() if party != self.number}
        threshold, parties = self._terms.threshold, self._terms.parties
        self_shares = split(attempt.seed, threshold, parties)
        key_shares = split(attempt.key_seed, threshold, parties)
        sealed = tuple(
            (
                party,
                seal_once(self._share_key(attempt, one, self.number, party), self_shares[party] + key_shares[party]),
            )
            for party, one in secrets.items()
        )
        attempt.secrets, attempt.keys_digest = secrets, shown
        attempt.sealed = SealedShares(attempt.number, sealed)
        return attempt.sealed

    def _check_adverts(self, request: KeyList, adverts: dict[int, Advert], attempt: _Attempt) -> None:
        if not increasing(tuple(advert.party for advert in request.adverts), self._terms.parties):
            raise Refused("participants", "parties must be named once, in order, and be in the roster")
        if len(adverts) < self._terms.minimum:
            raise Refused("few", f"{len(adverts)} parties have keys, the terms require {self._terms.minimum}")
        if adverts.get(self.number) != attempt.advert:
            raise Refused("keys", "the list shows other keys of this party than it made")
        for party, advert in adverts.items():
            if advert.terms != self._digest:
                raise Refused("terms", f"party {party} agreed to other terms")
            if advert.attempt != attempt.number:
                raise Refused("keys", f"the keys of party {party} belong to attempt {advert.attempt}")
            if not signed_by(self._roster.members[party].key, "advert", advert.signed_bytes, advert.signature):
                raise Refused("signature", f"the keys of party {party} are not signed with its key in the roster")

    def _share_key(self, attempt: _Attempt, secrets: _Secrets, sender: int, receiver: int) -> bytes:
        """The key under which one party seals shares for another."""
        return derive(secrets.sealing, self._digest, "share", attempt.number, sender, receiver)

    # ---- the vector ------------------------------------------------------------------------------------------------

    def _mask(self, request: Task, attempt: _Attempt) -> MaskedVector:
        payload = payload_digest(request.payload)  # stands for the payload from here on, which is hashed once
        shown = digest("task", encode(msgspec.structs.replace(request, payload=payload, history=(), deposit=b"")))
        if attempt.task_digest:
            if shown != attempt.task_digest:
                raise Refused("repeated", "another task was answered in this attempt")
            if attempt.masked is None:
                raise Refused("failed", "the vector of this attempt could not be made")
            return attempt.masked
        self._check_task(request, attempt)
        self._follow(request)
        if not self._position.allows(request.round) or request.round >= self._terms.rounds:
            raise Refused("round", f"round {request.round} does not follow round {self._position.round}")
        self._settle(request.round)
        made_for = receipt_content(
            statement_about(self._digest, attempt.number, request.round, payload, request.participants, self._position)
        )
        attempt.task_digest, attempt.payload_digest, attempt.task = shown, payload, request
        self._forget_all_but(attempt.number)
        assignment = Assignment(request.round, attempt.number, request.payload)
        self._contributor.pay(assignment)
        self._record.append(
            {"event": "input", "attempt": attempt.number, "round": request.round, "made_for": made_for.hex()}
        )
        self._entered = _Entered(attempt.number)
        self._known.add((attempt.number, made_for.hex()))
        made = self._contributor.contribute(assignment)
        content = deposit.seal(self._identity, self._digest, attempt.number, made.deposit) if made.deposit else b""
        receipt = self._identity.sign(RECEIPT, made_for)
        masked = self._masked(made.vector, request, attempt)
        attempt.masked = MaskedVector(attempt.number, memoryview(masked), memoryview(content), receipt)
        return attempt.masked

    def _check_task(self, request: Task, attempt: _Attempt) -> None:
        if attempt.sealed is None:
            raise Refused("order", "no shares were dealt in this attempt")
        if max(len(request.payload), len(request.deposit)) > largest_content(self._terms.dimension):
            raise Refused("malformed", f"the payload has {len(request.payload)} bytes, more than the dimension allows")
        participants = set(request.participants)
        if not increasing(request.participants, self._terms.parties) or not participants <= {
            *attempt.secrets,
            self.number,
        }:
            raise Refused("participants", "somebody takes part whose keys this party does not have")
        if self.number not in participants:
            raise Refused("participants", "this party does not take part")
        if len(participants) < self._terms.minimum:
            raise Refused("few", f"{len(participants)} parties take part, the terms require {self._terms.minimum}")
        senders = tuple(sender for sender, _ in request.shares)
        if not increasing(senders, self._terms.parties) or set(senders) != participants - {self.number}:
            raise Refused("participants", "there must be shares of every other participant")

    def _masked(self, vector: Vector, request: Task, attempt: _Attempt) -> bytes:
        dimension, dtype = self._terms.dimension, self._terms.dtype
        if vector.dtype.newbyteorder("<") != dtype or vector.shape != (dimension,):
            raise UsageError(f"a vector must be {dimension} unsigned numbers of {self._terms.modulus_bits} bits")
        masked = vector.astype(dtype)
        terms, where = self._digest, (request.round, attempt.number)
        for party in request.participants:
            if party == self.number:
                add_mask(masked, self_key(attempt.seed, terms, *where, party))
                continue
            secret = attempt.secrets[party].masking
            add_pair_mask(masked, pair_key(secret, terms, *where, self.number, party), self.number, party)
        return masked.tobytes()

    def _follow(self, request: Task) -> None:
        """Add certificates that this party does not know to its history.

        If one of them names this party for a vector of which its folder knows nothing, the folder is an old copy: the
        party refuses, or charges itself if its owner accepts the loss.
        """
        unknown: list[tuple[int, str]] = []
        position = self._position
        fresh: list[tuple[Position, Certificate]] = []
        for certificate in request.history:
            statement = certificate.statement
            if statement.count < position.count:
                continue  # known already
            check_certificate(certificate, self._terms, self._roster, position)
            position = position.after(statement)
            fresh.append((position, certificate))
            # A sum may be certified after this party entered a later attempt, so the newest attempt does not tell.
            vector = statement.attempt, receipt_content(statement).hex()
            if self.number in statement.survivors and vector not in self._known:
                unknown.append(vector)
        if unknown and not self.accept_loss:
            raise Refused(
                "restored", f"this party took part in attempt {unknown[-1][0]}, of which its folder knows nothing"
            )
        if unknown:
            self._recover(unknown, request.deposit)
        for end, certificate in fresh:
            self._write_certified(end, certificate)

    def _recover(self, unknown: list[tuple[int, str]], returned: bytes) -> None:
        last, _ = unknown[-1]
        held = deposit.unseal(self._identity, self._digest, returned, last) if returned else None
        self._contributor.recover([attempt for attempt, _ in unknown], held)
        newest = max(held[0] if held is not None else last, self._entered.attempt)
        self._record.append({"event": "recovered", "attempt": newest, "accepted": unknown})
        self._known.update(unknown)
        self._entered = _Entered(newest)

    def _write_certified(self, end: Position, certificate: Certificate) -> None:
        statement = certificate.statement
        mine = self.number in statement.survivors
        self._record.append(
            {
                "event": "certified",
                "attempt": statement.attempt,
                "round": statement.round,
                "mine": mine,
                "count": end.count,
                "history": end.digest.hex(),
            }
        )
        self._note_certified(statement.attempt, statement.round, mine)
        self._position = end

    def _note_certified(self, attempt: int, round: int, mine: bool) -> None:
        entered = self._entered
        if entered.certified_round is not None and entered.opened is None:
            entered.opened = round > entered.certified_round
        elif mine and attempt == entered.attempt:
            entered.certified_round = round

    def _settle(self, round: int) -> None:
        """Tell the contributor whether its last vector was counted. A round that is repeated was not opened."""
        entered = self._entered
        if entered.attempt < 0:
            return
        counted = entered.certified_round is not None and (
            entered.opened if entered.opened is not None else round > entered.certified_round
        )
        self._contributor.settle(entered.attempt, counted)

    # ---- the opening -----------------------------------------------------------------------------------------------

    def _endorse(self, request: Survivors, attempt: _Attempt) -> Endorsement:
        statement, task = request.statement, attempt.task
        if task is None or attempt.masked is None:
            raise Refused("order", "no vector was made in this attempt")
        shown = encode(statement)
        if attempt.endorsement is not None:
            if shown != attempt.statement:
                raise Refused("repeated", "another list of survivors was signed in this attempt")
            return attempt.endorsement
        check_statement(statement, self._terms, self._position)
        if statement.payload != attempt.payload_digest:
            raise Refused("survivors", "the others computed from another payload")
        if (statement.round, statement.participants) != (task.round, task.participants):
            raise Refused("survivors", "the statement names another round or other participants than the task")
        if self.number not in statement.survivors:
            raise Refused("survivors", "this party sent its vector and is not among the survivors")
        check_receipts(request, self._roster)
        attempt.statement = shown
        attempt.endorsement = Endorsement(attempt.number, self._identity.sign(SIGNED, shown))
        return attempt.endorsement

    def _reveal(self, request: Quorum, attempt: _Attempt) -> Reveal:
        certificate = request.certificate
        statement, task = certificate.statement, attempt.task
        if attempt.endorsement is None or task is None:
            raise Refused("order", "no list of survivors was signed in this attempt")
        if encode(statement) != attempt.statement:
            raise Refused("quorum", "the certificate is about another statement than the one that this party signed")
        if attempt.reveal is not None:
            return attempt.reveal
        check_certificate(certificate, self._terms, self._roster, self._position)
        self._write_certified(self._position.after(statement), certificate)
        survivors = set(statement.survivors)
        self_shares, key_shares, invalid = [], [], []
        for party, sealed in task.shares:
            text = unseal_once(self._share_key(attempt, attempt.secrets[party], party, self.number), sealed)
            if text is None:
                invalid.append(party)
            elif party in survivors:
                self_shares.append((party, text[:SEED]))
            else:
                key_shares.append((party, text[SEED:]))
        attempt.reveal = Reveal(attempt.number, attempt.seed, tuple(self_shares), tuple(key_shares), tuple(invalid))
        return attempt.reveal


def made_vectors(folder: Path) -> bool:
    """Whether the party of this folder may have made a vector, or was charged for one."""
    try:
        lines = read_chain(folder / FILE).lines
    except (LedgerDamaged, OSError):
        return True
    return any(line["event"] in ("recovered", "input") for line in lines)


def _agreed(attempt: _Attempt, other: Advert) -> _Secrets:
    """The secrets that this party shares with another. Raises `Refused` if the other's keys lead to none."""
    sealing, masking = attempt.encryption.shared(other.encryption_key), attempt.masking.shared(other.mask_key)
    if sealing is None or masking is None:
        raise Refused("keys", f"the keys of party {other.party} lead to no secret")
    return _Secrets(sealing, masking)


def _refusal(attempt: int, refused: Refused) -> Refusal:
    logging.getLogger("normec").warning(
        "secure sum, attempt %d refused (%s): %s", attempt, refused.reason, refused.exact
    )
    return Refusal(attempt, refused.reason)
