"""The server of a secure sum: it carries messages between parties, adds up what it cannot read, and opens one sum.

The caller decides how long to wait: `request` says what to send to whom, `receive` takes answers in any order, and
`advance` closes the current stage with those who answered. A party that does not answer in a stage has dropped out of
the attempt. If too few are left, `AttemptFailed` is raised, and `start` begins another attempt, for which the parties
draw fresh noise and pay again.

    server.start(round, payload)
    while server.sum is None:
        for party in server.addressees:
            …                                            # send server.request(party), server.receive(party, answer)
        server.advance()                                 # when server.ready, or after a time limit

The folder holds a hash chain of attempts and certificates, and `opening.bin`: the masked sum of a certified attempt,
written before anybody is asked to open it, and replaced by the opened sum. So a server that is killed asks the parties
again for the same shares, and never for those of another sum.
"""

from __future__ import annotations

import base64
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ...errors import UsageError
from ...privacy.hash_chain import Chain
from ...system.files import open_file, private_folder, read_if_present, write_atomic
from .deposit import LABEL
from .history import RECEIPT, SIGNED, Position, receipt_content, statement_of
from .keys import KeyPair, commitment, signed_by, usable
from .masks import Vector, add_mask, add_pair_mask, pair_key, self_key
from .refusals import Refused
from .roster import Roster
from .shares import recover
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
    Statement,
    Survivors,
    Task,
    decode_answers,
    encode,
    encode_apart,
    largest_content,
)

FILE = "secure-sum.jsonl"
OPENING = "opening.bin"
DEPOSITS = "deposits"
WRITERS = 16  # deposits that are written at the same time
MOST_REPORTS = 10_000  # the newest are kept
FIRST_ABSENCE = 8  # attempts without a party whose seeds could not be recovered, the first time


class Stage(IntEnum):
    """What the server waits for."""

    IDLE = 0
    KEYS = 1
    SHARES = 2
    VECTORS = 3
    SIGNATURES = 4
    REVEALS = 5


class AttemptFailed(RuntimeError):  # noqa: N818  (a state of the attempt, not a mistake)
    """Too few parties are left in an attempt; nothing of it was opened. `start` begins another one."""

    def __init__(self, stage: Stage, left: int, needed: int) -> None:
        super().__init__(f"{left} parties are left after {stage.name.lower()}, {needed} are needed; start again")
        self.stage, self.left, self.needed = stage, left, needed


class OpenedSum(NamedTuple):
    """The sum of the vectors of the survivors of an attempt, modulo 2^32 or 2^64 as the terms say."""

    round: int
    attempt: int
    survivors: tuple[int, ...]
    values: Vector


class Report(NamedTuple):
    """Something that a party did and should not have done, or a refusal."""

    party: int
    attempt: int
    what: str


class _Opening(Struct, frozen=True, array_like=True):
    """A certified sum that is being opened: the masked sum, or the opened one."""

    certificate: Certificate
    adverts: tuple[Advert, ...]
    values: bytes
    opened: Annotated[int, Meta(ge=0, le=1)]


@dataclass
class _Attempt:
    """What was received in one attempt."""

    number: int
    adverts: dict[int, Advert] = field(default_factory=dict)
    listed: tuple[int, ...] = ()
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    participants: tuple[int, ...] = ()
    vectors: dict[int, Vector] = field(default_factory=dict)
    deposits: dict[int, memoryview] = field(default_factory=dict)
    receipts: dict[int, bytes] = field(default_factory=dict)
    statement: Statement | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class Server:
    """The server of one run, which keeps its record in `folder`.

    Args:
        folder: The folder of this run.
        roster: The parties of the run.
        terms: The terms that the parties agreed to.
    """

    def __init__(self, folder: str | Path, roster: Roster, terms: Terms) -> None:
        terms.check_roster(roster)
        self._folder, self._roster, self._terms, self._digest = Path(folder), roster, terms, terms.digest
        self.stage = Stage.IDLE
        self.reports: deque[Report] = deque(maxlen=MOST_REPORTS)
        self.sum: OpenedSum | None = None
        self._payload = b""
        self._round = -1
        self._attempt = _Attempt(-1)
        self._next: _Attempt | None = None
        self._reveals: dict[int, Reveal] = {}
        self._opening: _Opening | None = None
        self._unfit: set[int] = set()  # parties without whose seeds the current sum cannot be opened
        self._false: set[int] = set()  # parties that revealed another seed than they committed to
        self._tried = 0  # reveals with which the current sum could not be opened
        self._left_out: dict[int, int] = {}  # by party, the attempt from which it is invited again
        self._given_up: Counter[int] = Counter()  # by party, how many sums were given up without its seeds
        self._doubted: set[int] = set()  # parties that revealed a false share; what they reveal is tried last
        self._history: list[Certificate] = []
        self._position, self._newest = Position(), -1
        private_folder(self._folder / DEPOSITS)
        self._record = Chain(self._folder / FILE)
        try:
            self._replay()
        except BaseException:
            self._record.close()
            raise

    def _replay(self) -> None:
        """Take the state from the record, and an opening that was under way from its file."""
        if not self._record.lines:
            self._record.append({"event": "begun", "terms": self._digest.hex()})
        elif self._record.lines[0].get("terms") != self._digest.hex():
            raise UsageError(f"{self._record.path} belongs to a run with other terms; use another folder for this run")
        for line in self._record.lines[1:]:
            if line["event"] == "attempt":
                self._newest = line["attempt"]
            elif line["event"] == "certified":
                self._add(msgspec.msgpack.decode(base64.b64decode(line["certificate"]), type=Certificate))
        held = read_if_present(self._folder / OPENING)
        if held is None:
            return
        try:
            opening = msgspec.msgpack.decode(held, type=_Opening)
        except msgspec.DecodeError as error:
            raise UsageError(f"{self._folder / OPENING} is damaged: {error}; restore it, or delete it") from None
        statement = opening.certificate.statement
        if statement.count == self._position.count:  # killed between the two writes
            self._certify(opening.certificate)
        elif statement.count != self._position.count - 1:
            raise UsageError(f"{self._folder / OPENING} does not belong to the end of {FILE}; restore it, or delete it")
        self._opening, self._round = opening, statement.round
        if opening.opened:
            self._publish(opening)
        else:
            self.stage = Stage.REVEALS

    def close(self) -> None:
        """Release the folder."""
        self._record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def attempt(self) -> int:
        """The number of the current attempt, or of the last one."""
        return self._statement.attempt if self._opening is not None else self._attempt.number

    def start(self, round: int, payload: bytes) -> None:
        """Begin an attempt to sum the vectors of a round.

        The previous sum is discarded, so store what follows from it first. A sum that was not opened is given up.

        Args:
            round: The round after the last one that was summed, or the same one again if it was not opened.
            payload: What the parties compute from; all survivors must have received the same.

        Raises:
            UsageError: The round does not follow the last one.
        """
        if not self._position.allows(round) or round >= self._terms.rounds:
            raise UsageError(f"round {round} cannot be summed after round {self._position.round}")
        if self.sum is not None and round <= self.sum.round:
            raise UsageError(f"round {round} was summed; its vectors must not be summed again")
        if self.sum is None and round == self._position.round + 1 and self.stage is Stage.REVEALS:
            raise UsageError(f"round {self._position.round} has not been opened; open it, or start it again")
        (self._folder / OPENING).unlink(missing_ok=True)
        for party in self._unfit:
            self._left_out[party] = self._newest + 1 + FIRST_ABSENCE * 2 ** self._given_up[party]
            self._given_up[party] += 1
        self._unfit, self._false, self._tried = set(), set(), 0
        opened, prepared = self.sum is not None, self._next
        self.sum, self._opening, self._reveals, self._next = None, None, {}, None
        self._round, self._payload = round, payload
        if opened and prepared is not None and len(_dealers(prepared)) >= self._terms.minimum:
            self._attempt, self.stage = prepared, Stage.SHARES
            self.advance()
        else:
            self._attempt, self.stage = self._new_attempt(), Stage.KEYS

    def _new_attempt(self) -> _Attempt:
        number = self._newest + 1
        if number >= self._terms.most_attempts:
            raise UsageError(f"the terms allow {self._terms.most_attempts} attempts; begin a new run")
        self._record.append({"event": "attempt", "attempt": number})
        self._newest = number
        return _Attempt(number)

    # ---- what is sent ----------------------------------------------------------------------------------------------

    @property
    def _invited(self) -> set[int]:
        """The parties that are asked for keys.

        A party whose seeds could not be recovered is left out for some attempts: it could repeat that in every one, for
        which the others pay. It may also be honest, if a party that holds one of its shares lies about it. So it is
        invited again, each time after twice as many attempts. If too few would be left, everybody is asked.
        """
        everyone = set(range(self._terms.parties))
        others = {party for party in everyone if self._left_out.get(party, 0) <= self._newest}
        return others if len(others) >= self._terms.minimum else everyone

    def invite_everyone(self) -> None:
        """Invite again the parties that are left out; for callers that get too few answers from the others."""
        self._left_out = {}

    @property
    def addressees(self) -> list[int]:
        """The parties to which `request` has something to send in this stage."""
        waiting = self.waiting
        return [party for party in range(self._terms.parties) if party in waiting or self._prepare(party) is not None]

    def request(self, party: int) -> bytes:
        """The exchange for a party, made when it is sent, because a task contains the whole payload."""
        return encode(self._exchange(party))

    def request_apart(self, party: int) -> tuple[bytes, bytes]:
        """The exchange for a party without the payload, and the payload, the same object for all parties.

        The payload is empty in exchanges without a task. A carrier that sends it once to all parties saves the rest.
        """
        return encode_apart(self._exchange(party))

    def _exchange(self, party: int) -> tuple[Request, ...]:
        prepared = self._prepare(party)
        parts = (self._request(party),) if party in self.waiting else ()
        return (*parts, prepared) if prepared is not None else parts

    def _request(self, party: int) -> Request:
        attempt = self._attempt
        if self.stage is Stage.KEYS:
            return Invitation(self._terms.canonical, attempt.number)
        if self.stage is Stage.SHARES:
            return _key_list(attempt)
        if self.stage is Stage.VECTORS:
            return self._task(party)
        if self.stage is Stage.SIGNATURES and attempt.statement is not None:
            receipts = tuple(attempt.receipts[one] for one in attempt.statement.survivors)
            return Survivors(attempt.statement, receipts)
        if self._opening is None:
            raise RuntimeError("nothing is asked for in this stage")
        return Quorum(self._opening.certificate)

    def _prepare(self, party: int) -> Request | None:
        """The part of an exchange that prepares the next attempt; None if there is none."""
        following = self._next
        if following is None or party in following.refused or party not in self._invited:
            return None
        if self.stage is Stage.SIGNATURES and party not in following.adverts:
            return Invitation(self._terms.canonical, following.number)
        if self.stage is Stage.REVEALS and party in following.listed and party not in following.sealed:
            return _key_list(following)
        return None

    def _task(self, party: int) -> Task:
        attempt = self._attempt
        advert = attempt.adverts[party]
        return Task(
            attempt=attempt.number,
            round=self._round,
            payload=self._payload,
            participants=attempt.participants,
            shares=tuple((other, attempt.sealed[other][party]) for other in attempt.participants if other != party),
            history=tuple(self._history[advert.count :]),
            deposit=self._deposit(party, advert.entered),
        )

    def _deposit(self, party: int, entered: int) -> bytes:
        """The newest deposit of a party, if the party does not know the attempt in which it was made."""
        try:
            with open_file(self._folder / DEPOSITS / f"{party}.bin") as file:
                label = file.read(LABEL)
                return label + file.read() if int.from_bytes(label, "big") >= entered else b""
        except FileNotFoundError:
            return b""

    # ---- what is received ------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> set[int]:
        """The parties whose answers in the current stage are still missing."""
        return self.missing - self._attempt.refused

    @property
    def missing(self) -> set[int]:
        """The parties that were asked in the current stage and have not answered, or refused."""
        expected, answered = self._progress()
        return expected - answered

    @property
    def faulty(self) -> set[int]:
        """The parties whose seeds could not be recovered, or were false when they revealed them."""
        return self._unfit | self._false

    @property
    def answered(self) -> int:
        """The number of parties that have answered in the current stage."""
        return len(self._progress()[1])

    def _progress(self) -> tuple[set[int], set[int]]:
        """The parties that are asked in the current stage, and those that have answered."""
        attempt = self._attempt
        expected, answered = set[int](), set[int]()
        if self.stage is Stage.KEYS:
            expected, answered = self._invited, set(attempt.adverts)
        elif self.stage is Stage.SHARES:
            expected, answered = set(attempt.listed), set(attempt.sealed)
        elif self.stage is Stage.VECTORS:
            expected, answered = set(attempt.participants), set(attempt.vectors)
        elif self.stage is Stage.SIGNATURES and attempt.statement is not None:
            expected, answered = set(attempt.statement.survivors), set(attempt.signatures)
        elif self.stage is Stage.REVEALS:
            expected, answered = set(self._statement.survivors), set(self._reveals)
        return expected, answered

    @property
    def ready(self) -> bool:
        """Whether all parties that can still answer in this stage have done so."""
        return self.stage is not Stage.IDLE and not self.waiting

    def receive(self, party: int, data: bytes) -> None:
        """Take the answer of a party that the carrier authenticated. What does not fit is reported and ignored."""
        try:
            answers = decode_answers(data)
        except Refused as refused:
            self._report(party, f"sent a message that cannot be read: {refused.exact}")
            return
        self.take(party, answers)

    def take(self, party: int, answers: Sequence[Answer]) -> None:
        """Take answers that were read already."""
        for answer in answers:
            attempt = self._find(answer.attempt)
            if attempt is None:
                self._report(party, f"sent a late {type(answer).__name__} of attempt {answer.attempt}")
            else:
                self._take_one(party, answer, attempt)

    def _find(self, number: int) -> _Attempt | None:
        if self.stage is Stage.REVEALS and number == self._statement.attempt:
            return self._attempt
        return next((one for one in (self._attempt, self._next) if one is not None and one.number == number), None)

    def _take_one(self, party: int, answer: Answer, attempt: _Attempt) -> None:
        if isinstance(answer, Refusal):
            attempt.refused.add(party)
            self._report(party, f"refused: {answer.reason}")
        elif isinstance(answer, Advert):
            self._take_advert(party, answer, attempt)
        elif isinstance(answer, SealedShares):
            self._take_shares(party, answer, attempt)
        elif isinstance(answer, MaskedVector):
            self._take_vector(party, answer, attempt)
        elif isinstance(answer, Endorsement):
            self._take_signature(party, answer, attempt)
        else:
            self._take_reveal(party, answer)

    def _take_advert(self, party: int, advert: Advert, attempt: _Attempt) -> None:
        key = self._roster.members[party].key
        if self._repeated(party, attempt.adverts.get(party), advert) or attempt.listed:
            return
        if party not in self._invited:
            self._report(
                party, "sent keys, and is left out for a while, because an earlier sum could not be opened without it"
            )
        elif (advert.party, advert.terms) != (party, self._digest):
            self._report(party, "sent keys for another party or other terms")
        elif not signed_by(key, "advert", advert.signed_bytes, advert.signature):
            self._report(party, "sent keys that are not signed with its key in the roster")
        elif not (usable(advert.encryption_key) and usable(advert.mask_key)):
            self._report(party, "sent keys that lead to no secret")
        elif advert.count > self._position.count:
            self._report(party, f"knows {advert.count} certified sums, this server {self._position.count}")
        else:
            attempt.adverts[party] = advert

    def _take_shares(self, party: int, answer: SealedShares, attempt: _Attempt) -> None:
        shares = dict(answer.shares)
        if self._repeated(party, attempt.sealed.get(party), shares) or attempt.participants:
            return
        if party not in attempt.listed or set(shares) != set(attempt.listed) - {party}:
            self._report(party, "did not send one share for each other party")
        else:
            attempt.sealed[party] = shares

    def _take_vector(self, party: int, answer: MaskedVector, attempt: _Attempt) -> None:
        if party in attempt.vectors and attempt.vectors[party].tobytes() != answer.vector:
            self._report(party, "sent two different vectors; the first one counts")
        elif self.stage is not Stage.VECTORS or party not in attempt.participants:
            self._report(party, f"sent a late vector of attempt {answer.attempt}")
        elif len(answer.vector) != (size := self._terms.dtype.itemsize * self._terms.dimension):
            self._report(party, f"sent a vector of {len(answer.vector)} bytes, not {size}")
        elif len(answer.deposit) > largest_content(self._terms.dimension):
            self._report(party, f"deposits {len(answer.deposit)} bytes, more than the dimension allows")
        elif not signed_by(self._roster.members[party].key, RECEIPT, receipt_content(_stated(attempt)), answer.receipt):
            self._report(party, "sent a vector without a receipt for this task that is signed with its key")
        elif party not in attempt.vectors:
            if answer.deposit:
                attempt.deposits[party] = answer.deposit
            attempt.vectors[party] = np.frombuffer(answer.vector, dtype=self._terms.dtype).copy()
            attempt.receipts[party] = answer.receipt

    def _take_signature(self, party: int, answer: Endorsement, attempt: _Attempt) -> None:
        statement = attempt.statement
        if statement is None or self.stage is not Stage.SIGNATURES or party not in statement.survivors:
            self._report(party, f"sent a late signature of attempt {answer.attempt}")
        elif not signed_by(self._roster.members[party].key, SIGNED, encode(statement), answer.signature):
            self._report(party, "signed another list of survivors")
        else:
            attempt.signatures[party] = answer.signature

    def _take_reveal(self, party: int, answer: Reveal) -> None:
        if self.stage is not Stage.REVEALS or answer.attempt != self._statement.attempt:
            self._report(party, f"sent late shares of attempt {answer.attempt}")
            return
        statement = self._statement
        survivors = set(statement.survivors)
        participants, invalid = set(statement.participants), set(answer.invalid)
        if party not in survivors or self._repeated(party, self._reveals.get(party), answer):
            return
        seeds = {owner for owner, _ in answer.self_shares}
        keys = {owner for owner, _ in answer.key_shares}
        if not (seeds <= survivors - {party} and keys <= participants - survivors):
            self._report(party, "revealed shares that nobody asked for")
            return
        if seeds | keys | invalid != participants - {party}:
            self._report(party, "did not reveal a share of each other participant")
            return
        for owner in answer.invalid:
            self._report(party, f"says that the shares of party {owner} cannot be decrypted")
        self._reveals[party] = answer

    def _repeated(self, party: int, known: object, given: object) -> bool:
        if known is not None and known != given:
            self._report(party, f"sent two different {type(given).__name__}; the first one counts")
        return known is not None

    def _report(self, party: int, what: str) -> None:
        self.reports.append(Report(party, self.attempt, what))

    # ---- stages ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Close the current stage with the parties that have answered.

        Raises:
            AttemptFailed: Too few parties are left. While shares are missing, later answers can still open the sum.
        """
        attempt, terms = self._attempt, self._terms
        if self.stage is Stage.KEYS:
            self._require(len(attempt.adverts), terms.minimum)
            attempt.listed, self.stage = tuple(sorted(attempt.adverts)), Stage.SHARES
        elif self.stage is Stage.SHARES:
            dealers = _dealers(attempt)
            self._require(len(dealers), terms.minimum)
            attempt.participants, self.stage = dealers, Stage.VECTORS
            attempt.statement = statement_of(
                self._digest, attempt.number, self._round, self._payload, dealers, self._position
            )
        elif self.stage is Stage.VECTORS:
            self._require(len(attempt.vectors), terms.minimum)
            self._state_survivors()
        elif self.stage is Stage.SIGNATURES:
            self._require(len(attempt.signatures), terms.threshold)
            self._begin_opening()
        elif self.stage is Stage.REVEALS:
            self._open()

    def _require(self, left: int, needed: int) -> None:
        if left < needed:
            stage, self.stage = self.stage, Stage.IDLE
            raise AttemptFailed(stage, left, needed)

    def _keep_deposits(self, deposits: Mapping[int, memoryview]) -> None:
        """Write deposits to the disk in parallel, because most of the time is spent waiting for the disk."""
        if not deposits:
            return

        def write(party: int) -> None:
            write_atomic(self._folder / DEPOSITS / f"{party}.bin", deposits[party], private=True)

        with ThreadPoolExecutor(min(len(deposits), WRITERS)) as pool:
            list(pool.map(write, deposits))

    def _state_survivors(self) -> None:
        attempt = self._attempt
        self._keep_deposits(attempt.deposits)
        attempt.deposits = {}
        attempt.statement = msgspec.structs.replace(_stated(attempt), survivors=tuple(sorted(attempt.vectors)))
        if self._round + 1 < self._terms.rounds:
            self._next = self._new_attempt()
        attempt.refused, self.stage = set(), Stage.SIGNATURES

    def _begin_opening(self) -> None:
        attempt = self._attempt
        statement = _stated(attempt)
        total = np.zeros(self._terms.dimension, dtype=self._terms.dtype)
        for party in statement.survivors:
            total += attempt.vectors[party]
        adverts = tuple(attempt.adverts[party] for party in attempt.participants)
        certificate = Certificate(statement, tuple(sorted(attempt.signatures.items())))
        self._opening = _Opening(certificate, adverts, total.tobytes(), 0)
        self._save(self._opening)
        self._certify(certificate)
        if self._next is not None:
            self._next.listed = tuple(sorted(self._next.adverts))
        attempt.vectors, attempt.refused, self.stage = {}, set(), Stage.REVEALS

    def _certify(self, certificate: Certificate) -> None:
        self._record.append({"event": "certified", "certificate": base64.b64encode(encode(certificate)).decode()})
        self._add(certificate)

    def _add(self, certificate: Certificate) -> None:
        self._history.append(certificate)
        self._position = self._position.after(certificate.statement)

    def _save(self, opening: _Opening) -> None:
        write_atomic(self._folder / OPENING, msgspec.msgpack.encode(opening), private=True)

    @property
    def _statement(self) -> Statement:
        """The statement of the sum that is being opened."""
        if self._opening is None:
            raise RuntimeError("no sum is being opened")
        return self._opening.certificate.statement

    # ---- the opening -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Remove the masks with what was revealed."""
        opening, statement = self._opening, self._statement
        if opening is None:
            raise RuntimeError("no sum is being opened")
        if len(self._reveals) == self._tried:  # a search among shares takes long, and would end as before
            raise AttemptFailed(self.stage, 0, self._terms.threshold)
        self._unfit, self._tried = set(), len(self._reveals)
        adverts = {advert.party: advert for advert in opening.adverts}
        total = np.frombuffer(opening.values, dtype=self._terms.dtype).copy()
        where = (statement.round, statement.attempt)
        seeds = {party: self._self_seed(adverts[party]) for party in statement.survivors}
        pairs = {
            party: self._key_pair(adverts[party])
            for party in statement.participants
            if party not in statement.survivors
        }
        for party, seed in seeds.items():
            add_mask(total, self_key(seed, self._digest, *where, party), negative=True)
        for gone, pair in pairs.items():
            for party in statement.survivors:
                secret = pair.shared(adverts[party].mask_key)
                if secret is None:
                    raise RuntimeError("a key that leads to no secret was accepted")
                add_pair_mask(total, pair_key(secret, self._digest, *where, party, gone), party, gone, remove=True)
        done = _Opening(opening.certificate, (), total.tobytes(), 1)
        self._save(done)
        self._publish(done)

    def _publish(self, opening: _Opening) -> None:
        statement = opening.certificate.statement
        values = np.frombuffer(opening.values, dtype=self._terms.dtype).copy()
        self.sum = OpenedSum(statement.round, statement.attempt, statement.survivors, values)
        self._opening, self.stage = opening, Stage.IDLE

    def _self_seed(self, advert: Advert) -> bytes:
        """The seed of a survivor's self mask, from the party itself or else from shares."""

        def is_right(seed: bytes) -> bool:
            return commitment(seed, self._digest, advert.attempt, advert.party) == advert.commitment

        own = self._reveals.get(advert.party)
        if own is not None and is_right(own.seed):
            return own.seed
        if own is not None:
            self._report(advert.party, "revealed another seed than it committed to")
            self._false.add(advert.party)
        return self._recovered(advert, {by: dict(one.self_shares) for by, one in self._reveals.items()}, is_right)

    def _key_pair(self, advert: Advert) -> KeyPair:
        """The key pair of a dropout, from shares of its seed."""

        def pair(seed: bytes) -> KeyPair:
            return KeyPair.from_seed(seed, self._digest, advert.attempt, advert.party)

        revealed = {by: dict(one.key_shares) for by, one in self._reveals.items()}
        return pair(self._recovered(advert, revealed, lambda seed: pair(seed).public == advert.mask_key))

    def _recovered(
        self, advert: Advert, revealed: Mapping[int, Mapping[int, bytes]], is_right: Callable[[bytes], bool]
    ) -> bytes:
        threshold = self._terms.threshold
        order = sorted(revealed, key=lambda by: (by in self._doubted, by))
        shares = {by: revealed[by][advert.party] for by in order if advert.party in revealed[by]}
        if len(set(revealed) - {advert.party}) < threshold:
            raise AttemptFailed(self.stage, len(shares), threshold)
        seed, false = recover(shares, threshold, is_right) if len(shares) >= threshold else (None, [])
        for party in false:
            self._report(party, f"revealed a false share of party {advert.party}")
            self._doubted.add(party)  # else it would make each search as long as this one
        if seed is None:
            self._report(advert.party, "dealt shares that do not fit, or others revealed false ones")
            self._unfit.add(advert.party)
            raise AttemptFailed(self.stage, 0, threshold)
        return seed


def _key_list(attempt: _Attempt) -> KeyList:
    return KeyList(attempt.number, tuple(attempt.adverts[party] for party in attempt.listed))


def _stated(attempt: _Attempt) -> Statement:
    """What an attempt is about; its survivors are missing until all vectors are there."""
    if attempt.statement is None:
        raise RuntimeError("nobody takes part in this attempt yet")
    return attempt.statement


def _dealers(attempt: _Attempt) -> tuple[int, ...]:
    """The parties that dealt shares to all others of the list."""
    return tuple(sorted(attempt.sealed))
