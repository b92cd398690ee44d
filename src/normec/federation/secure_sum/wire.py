"""The messages of a secure sum and their bytes (MessagePack). Every number and every length has a limit.

An exchange is one list of requests to a party and the list of its answers. Keys for the next attempt travel in the
exchanges of the current one: a round takes three exchanges, and the first takes five.

| exchange | the server sends | the party answers |
| --- | --- | --- |
| keys (first round) | `Invitation` | `Advert`: two public keys, and a commitment to the self mask |
| shares (first round) | `KeyList`: the adverts of all | `SealedShares`: shares of its seeds, encrypted to the others |
| 1 | `Task`: what to compute, the participants and their shares | `MaskedVector`, with a receipt |
| 2 | `Survivors`, with receipts; and `Invitation` of the next attempt | `Endorsement`: its signature; and `Advert` |
| 3 | `Quorum`: t signatures, and `KeyList` of the next attempt | `Reveal`: shares of the masks; and `SealedShares` |
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .keys import KEY, SEED, SIGNATURE, TAG
from .refusals import REASONS, Refused
from .roster import MOST
from .terms import LARGEST_DIMENSION, LARGEST_TERMS, MOST_ROUNDS

MOST_LINKS = MOST_ROUNDS
SEALED_SHARE = 2 * SEED + TAG


def largest_content(dimension: int) -> int:
    """The most bytes of a payload or a deposit: eight vectors in double precision, and some more."""
    return 64 * dimension + 2**16


PartyNumber = Annotated[int, Meta(ge=0, lt=MOST)]
Attempt = Annotated[int, Meta(ge=0, lt=2**31)]
Round = Annotated[int, Meta(ge=0, lt=MOST_ROUNDS)]
Digest = Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]
PublicKey = Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE, max_length=SIGNATURE)]
Seed = Annotated[bytes, Meta(min_length=SEED, max_length=SEED)]
Sealed = Annotated[bytes, Meta(min_length=SEALED_SHARE, max_length=SEALED_SHARE)]
Parties = Annotated[tuple[PartyNumber, ...], Meta(max_length=MOST)]
Content = Annotated[bytes, Meta(max_length=largest_content(LARGEST_DIMENSION))]


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message, or a part of one; its bytes are a list of its kind and its fields in their order."""


class Statement(Message, frozen=True):
    """What the survivors of an attempt sign: which sum may be opened, and which sums were opened before it.

    `payload` is the digest of what the parties computed from, `count` the number of sums that were certified before,
    and `history` the digest of their chain.
    """

    terms: Digest
    attempt: Attempt
    round: Round
    payload: Digest
    participants: Parties
    survivors: Parties
    count: Annotated[int, Meta(ge=0, lt=MOST_LINKS)]
    history: Digest


class Certificate(Message, frozen=True):
    """A statement with signatures of survivors, by their numbers."""

    statement: Statement
    signatures: Annotated[tuple[tuple[PartyNumber, Signature], ...], Meta(max_length=MOST)]


class Invitation(Message, frozen=True):
    """The server asks for keys for an attempt, and says under which terms."""

    terms: Annotated[bytes, Meta(max_length=LARGEST_TERMS)]
    attempt: Attempt


class Advert(Message, frozen=True):
    """The keys of a party for one attempt.

    `commitment` binds the party to the seed of its self mask. `count` says how many certified sums the party knows, and
    `entered` is one more than the last attempt for which it made a vector (0 if there is none).
    """

    party: PartyNumber
    attempt: Attempt
    terms: Digest
    encryption_key: PublicKey
    mask_key: PublicKey
    commitment: Digest
    count: Annotated[int, Meta(ge=0, le=MOST_LINKS)]
    entered: Annotated[int, Meta(ge=0, le=2**31)]
    signature: Signature = bytes(SIGNATURE)

    @property
    def signed_bytes(self) -> bytes:
        return encode(msgspec.structs.replace(self, signature=bytes(SIGNATURE)))


class KeyList(Message, frozen=True):
    """The adverts of the parties that take part in an attempt, in the order of their numbers."""

    attempt: Attempt
    adverts: Annotated[tuple[Advert, ...], Meta(max_length=MOST)]


class SealedShares(Message, frozen=True):
    """Shares of a party's two seeds, each pair encrypted to its receiver."""

    attempt: Attempt
    shares: Annotated[tuple[tuple[PartyNumber, Sealed], ...], Meta(max_length=MOST)]


class Task(Message, frozen=True):
    """What the parties compute in a round, who takes part, and the shares that the others sealed for this party.

    `history` holds the certificates that the party does not know yet, and `deposit` the newest deposit of a party that
    has lost it (empty otherwise).
    """

    attempt: Attempt
    round: Round
    payload: Content
    participants: Parties
    shares: Annotated[tuple[tuple[PartyNumber, Sealed], ...], Meta(max_length=MOST)]
    history: Annotated[tuple[Certificate, ...], Meta(max_length=MOST_LINKS)] = ()
    deposit: Content = b""


class MaskedVector(Message, frozen=True):
    """A party's vector under its masks, its sealed memory (empty if it deposits none), and a receipt.

    The receipt is the party's signature that it made a vector for this task (`history.receipt_content`). The vector and
    the deposit of a message that was read point into the bytes of its exchange.
    """

    attempt: Attempt
    vector: Annotated[memoryview, Meta(max_length=8 * LARGEST_DIMENSION)]
    deposit: Annotated[memoryview, Meta(max_length=largest_content(LARGEST_DIMENSION))] = memoryview(b"")
    receipt: Signature = bytes(SIGNATURE)


class Survivors(Message, frozen=True):
    """The server names the parties whose vectors it received, and shows their receipts in the same order."""

    statement: Statement
    receipts: Annotated[tuple[Signature, ...], Meta(max_length=MOST)] = ()


class Endorsement(Message, frozen=True):
    """A survivor's signature of the statement."""

    attempt: Attempt
    signature: Signature


class Quorum(Message, frozen=True):
    """The server shows that enough survivors signed the same statement."""

    certificate: Certificate


class Reveal(Message, frozen=True):
    """The seed of the party's own self mask, its shares of the other survivors' seeds, and of the dropouts' key seeds.

    `invalid` names parties whose sealed shares could not be decrypted.
    """

    attempt: Attempt
    seed: Seed
    self_shares: Annotated[tuple[tuple[PartyNumber, Seed], ...], Meta(max_length=MOST)]
    key_shares: Annotated[tuple[tuple[PartyNumber, Seed], ...], Meta(max_length=MOST)]
    invalid: Parties = ()


class Refusal(Message, frozen=True):
    """A party does not answer a request, for one of the reasons in `refusals.REASONS`."""

    attempt: Attempt
    reason: Annotated[str, Meta(max_length=16)]


Request = Invitation | KeyList | Task | Survivors | Quorum
Answer = Advert | SealedShares | MaskedVector | Endorsement | Reveal | Refusal
MOST_PARTS = 2  # of an exchange
_REQUESTS = msgspec.msgpack.Decoder(Annotated[tuple[Request, ...], Meta(min_length=1, max_length=MOST_PARTS)])
_ANSWERS = msgspec.msgpack.Decoder(Annotated[tuple[Answer, ...], Meta(min_length=1, max_length=MOST_PARTS)])


def encode(content: Message | tuple[Message, ...]) -> bytes:
    """The bytes of a message or of an exchange: always the same for the same content."""
    return msgspec.msgpack.encode(content)


def encode_apart(requests: tuple[Request, ...]) -> tuple[bytes, bytes]:
    """The bytes of an exchange without the payload of its task, and the payload, which is the same for all parties."""
    payload = b"".join(request.payload for request in requests if isinstance(request, Task))
    return encode(tuple(_with_payload(request, b"") for request in requests)), payload


def decode_requests(data: bytes | memoryview, payload: bytes = b"") -> tuple[Request, ...]:
    """Read an exchange from the server. Raises `Refused` if it breaks a rule of the format.

    Args:
        data: The bytes of the exchange.
        payload: The payload of its task, if it came apart from the exchange (`encode_apart`).
    """
    requests: tuple[Request, ...] = tuple(_decoded(_REQUESTS, data))
    if not payload:
        return requests
    tasks = [request for request in requests if isinstance(request, Task)]
    if len(tasks) != 1 or tasks[0].payload:
        raise Refused(
            "malformed", "a payload outside of its exchange needs exactly one task there, which has no payload itself"
        )
    if len(payload) > largest_content(LARGEST_DIMENSION):
        raise Refused(
            "malformed", f"the payload has {len(payload)} bytes, more than {largest_content(LARGEST_DIMENSION)}"
        )
    return tuple(_with_payload(request, payload) for request in requests)


def _with_payload(request: Request, payload: bytes) -> Request:
    return msgspec.structs.replace(request, payload=payload) if isinstance(request, Task) else request


def decode_answers(data: bytes | memoryview) -> tuple[Answer, ...]:
    """Read an exchange from a party. Raises `Refused` if it breaks a rule of the format."""
    answers: tuple[Answer, ...] = tuple(_decoded(_ANSWERS, data))
    if any(isinstance(answer, Refusal) and answer.reason not in REASONS for answer in answers):
        raise Refused("malformed", "a refusal has an unknown reason")
    return answers


def attempt_of(request: Request) -> int:
    """The attempt that a request belongs to."""
    if isinstance(request, Survivors):
        return request.statement.attempt
    if isinstance(request, Quorum):
        return request.certificate.statement.attempt
    return request.attempt


def increasing(parties: tuple[int, ...], limit: int) -> bool:
    """Whether these are numbers of parties below `limit`, each once and in order."""
    return all(a < b for a, b in zip(parties, (*parties[1:], limit), strict=True)) and all(p >= 0 for p in parties)


def _decoded(decoder: Any, data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # names the field and the rule
        raise Refused("malformed", str(error)[:200]) from None
