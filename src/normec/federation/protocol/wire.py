"""The wire format: messages between server and party, each a flat table of numbers, words and arrays.

`to_fields` and `from_fields` convert a message to a table and back. Nothing is unpickled. A field that is unknown,
missing, of another type, outside its limits (`LIMITS`) or not finite raises a `WireError` that names the field and the
rule, but never the contents.

`encoding` is "plain" for float32 or float64 numbers. A secure sum has messages of its own (`federation.secure_sum`),
whose bytes `SumRequest` and `SumReply` carry.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_type_hints

import numpy as np

from ...errors import UsageError, WireError
from .terms import LONGEST_SPEC, METHOD_NAME, MethodTerms, PlanTerms, PrivacyTerms, read_spec

FORMAT = 1
ENCODING = "plain"
LARGEST = 2**28  # the most numbers in an array, unless the reader sets a lower limit
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

OCTETS = np.dtype(np.uint8)

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Octets = np.ndarray[Any, np.dtype[np.uint8]]
Fields = dict[str, int | float | str | bool | Array | Octets]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN = re.compile(rf"{NAME.pattern}~[0-9a-f]{{16}}")  # a run's name and the number that its server drew; see `run_name`
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")
_TOKEN = re.compile(r"(?:[0-9a-f]{32})?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_CODE = re.compile(r"(?:[0-9a-f]{16})?")
_SPEC = re.compile(r"[ -~]{2,}")  # printable ASCII
_LONGEST = 128  # characters of a word
LARGEST_NUMBER = 1e30  # in x and in a row: far above the values of any model, and sums of such numbers stay finite
MOST_ROUNDS = 2**31
# The smallest and the largest value of each number that a party computes with. The limits are public, and wide enough
# for any training; within them, no sum, product or table of a party overflows.
LIMITS: dict[str, tuple[float, float]] = {
    "round": (0, MOST_ROUNDS - 1),
    "parties": (1, 2**20),
    "privacy.sigma": (0.0, 1e9),
    "privacy.least_sigma": (0.0, 1e9),
    "privacy.bound": (0.0, 1e9),
    "privacy.delta": (0.0, 1.0),
    "plan.batch_size": (0, 2**31),
    "plan.rounds": (1, MOST_ROUNDS),
    "plan.local.steps": (1, 2**20),
    "plan.local.lr": (1e-12, 1e9),
    "plan.local.momentum": (0.0, 1.0),
    "plan.local.prox": (0.0, 1e9),
    "plan.heaviest": (1.0, 2**20),
    "plan.records.clip": (1e-9, 1e9),
    "plan.records.divisor": (1.0, 2**40),
    "plan.records.batch_rate": (1e-9, 1.0),
    "record.lost": (0, MOST_ROUNDS),
    "step": (1, MOST_ROUNDS),
}
LEAST_SIGMA = 1e-9  # of a run with noise


@dataclass(frozen=True)
class Record:
    """The server's record of a party.

    `accepted` is the number of its messages in ĝ, `since` the round after the last of them (0 if there are none), and
    `digest` the digest of their chain (`chained`). `dropped` is the digest of the message that was dropped since then.
    `lost` is the number of messages that may have been made but were not accepted: one for each dropped message, and
    one for each handshake except the first. `token` is that of the last handshake, and `row` the server's g_i, for a
    party that lost its own.
    """

    accepted: int = 0
    since: int = 0
    digest: str = ""
    dropped: str = ""
    lost: int = 0
    token: str = ""
    row: Array | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """The server asks a party, which is client `index` of `parties`, for its message of `round` at `x`.

    `run` is NAME~NUMBER. The server draws the random number once, so that a party never confuses two runs with the same
    name. `public` holds the numbers that the method broadcasts beside x, one after the other (`method_checks`).
    """

    run: str
    node: str
    round: int
    index: int
    parties: int
    x: Array
    method: MethodTerms
    privacy: PrivacyTerms
    plan: PlanTerms
    record: Record
    public: Array | None = None

    @property
    def cover(self) -> str:
        """An identifier of the noise that covers a message for this request.

        It changes with the kind and size of the noise, the method and its bound, the number of parties, which share
        the noise of a central sum, the largest weight, which that noise must cover, and with what bounds the effect of
        one record. Under local trust a message carries the noise of the round in which it was made, so a noise that
        changes by round is identified by the smallest of the run. The noise of a central sum is that of the round in
        which the message is added up.
        """
        noise, method, heaviest = self.privacy, self.method, self.plan.heaviest
        scheduled = noise.least_sigma is not None and noise.trust == "local"
        sigma = noise.least_sigma if scheduled else noise.sigma
        stated: tuple[Any, ...] = (
            *(noise.noise, noise.trust, sigma),
            *(method.name, method.code, noise.bound, self.parties),
        )
        if heaviest is not None:
            stated = (*stated, heaviest)
        if noise.unit == "record":
            stated = (*stated, noise.unit, noise.memory, self.plan.records)
        return "/".join(map(str, stated))


@dataclass(frozen=True, eq=False)
class Reply:
    """A party sends its message number `step` (from 1), computed in `round`; `digest` is the digest of its chain."""

    run: str
    node: str
    round: int
    step: int
    digest: str
    message: Array
    loss: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A party sends no message, for one of a few fixed reasons. With the reason "state" it also sends a `token`."""

    run: str
    node: str
    round: int
    reason: str
    token: str = ""


@dataclass(frozen=True, eq=False)
class SumRequest:
    """The server's bytes of an exchange of a secure sum; with `purpose` "roster", a question for the party's roster.

    `round` is the server's number of the exchange. `payload` is that of the exchange's task: it is the same for all
    parties, and so travels to the SuperLink once, while the rest of an exchange differs.
    """

    run: str
    node: str
    round: int
    purpose: str
    content: Octets
    payload: Octets | None = None


@dataclass(frozen=True, eq=False)
class SumReply:
    """A party's bytes in answer to a `SumRequest`."""

    run: str
    node: str
    round: int
    content: Octets


Message = Request | Reply | Refusal | SumRequest | SumReply
# All that a party may say; the exact reason stays in its own log.
REASONS = {
    "malformed": "the request could not be read",
    "terms": "the party does not take part under these terms",
    "noise": "the noise is less than the party requires",
    "budget": "the party's privacy budget does not allow it",
    "state": "the party has no state of this run and asks for the server's record",
    "lost": "the party lost its state of this run, and the method cannot restore it",
    "late": "the party has answered a newer request of this run",
    "failed": "the party could not compute its message",
}
KINDS: dict[str, type[Message]] = {
    "request": Request,
    "reply": Reply,
    "refusal": Refusal,
    "sum-request": SumRequest,
    "sum-reply": SumReply,
}
_PATTERNS = {
    "run": RUN,
    "node": NAME,
    "digest": _DIGEST,
    "record.digest": _DIGEST,
    "record.dropped": _DIGEST,
    "token": _TOKEN,
    "record.token": _TOKEN,
    "method.name": METHOD_NAME,
    "method.code": _CODE,
    "method.spec": _SPEC,
}
_ADDRESS = {"run": str, "node": str, "round": int}
Kind = TypeVar("Kind")


def octets(content: bytes) -> Octets:
    """Bytes as an array, which travels in chunks."""
    return np.frombuffer(content, OCTETS)


def most_octets(largest: int) -> int:
    """The most bytes of an exchange of a secure sum, in a run whose arrays have at most `largest` numbers."""
    return 64 * largest + 2**23


def to_fields(message: Message) -> Fields:
    """Convert a message to a flat table."""
    kind = next(name for name, known in KINDS.items() if isinstance(message, known))
    return {"format": FORMAT, "kind": kind, "encoding": ENCODING, **_flat(message, "")}


def from_fields(table: Mapping[str, Any], largest: int = LARGEST) -> Message:
    """Convert a flat table to a message. Raises `WireError` if any field is invalid."""
    if not isinstance(table, Mapping) or not all(type(name) is str for name in table):
        raise WireError("a message must be a table with names")
    rest = dict(table)
    header: dict[str, Any] = {name: rest.pop(name, None) for name in ("format", "kind", "encoding")}
    if type(header["format"]) is not int or header["format"] != FORMAT:
        raise WireError(f"format must be {FORMAT}")
    if type(header["kind"]) is not str or header["kind"] not in KINDS:
        raise WireError(f"kind must be one of {', '.join(KINDS)}")
    if type(header["encoding"]) is not str or header["encoding"] != ENCODING:
        raise WireError(f"encoding must be {ENCODING!r}")
    built = _built(KINDS[header["kind"]], rest, "", largest)
    if rest:
        raise WireError(f"{len(rest)} unknown field(s)")
    if isinstance(built, Request):
        _check_request(built)
    if isinstance(built, Refusal) and built.reason not in REASONS:
        raise WireError("reason must be a known one")
    return built


def run_name(run: str) -> str:
    """The name of a run without its random number."""
    return run.partition("~")[0]


def chained(previous: str, step: int, message: Array) -> str:
    """The digest of a party's messages up to `step`: SHA-256 of the digest so far, the step and the message's bytes.

    Server and party compare it to make sure that they refer to the same messages.
    """
    digest = hashlib.sha256(f"{previous}/{step}/{message.dtype.str}/".encode())
    digest.update(message.tobytes())
    return digest.hexdigest()


def addressed(table: Any) -> tuple[str, str, int]:
    """The run, party and round of a request that may be malformed elsewhere. Raises `WireError`."""
    if not isinstance(table, Mapping):
        raise WireError("a message must be a table with names")
    run, node, round = (_scalar(name, table.get(name), kind) for name, kind in _ADDRESS.items())
    return cast(tuple[str, str, int], (run, node, round))


def _check_request(request: Request) -> None:
    record = request.record
    try:
        read_spec(request.method.spec)
    except UsageError as error:
        raise WireError(str(error)) from None
    if not request.index < request.parties:
        raise WireError("index must be below parties")
    if not request.round < request.plan.rounds:
        raise WireError("round must be below plan.rounds")
    if request.plan.heaviest is not None and not request.plan.heaviest <= request.parties:
        raise WireError("plan.heaviest must not be above parties")
    if not record.accepted <= record.since <= request.round:
        raise WireError("record.accepted and record.since must not exceed the number of past rounds")
    if request.privacy.noise != "none" and request.privacy.sigma < LEAST_SIGMA:
        raise WireError(f"privacy.sigma must be at least {LEAST_SIGMA:g} in a run with noise")
    least = request.privacy.least_sigma
    if least is not None and not LEAST_SIGMA <= least <= request.privacy.sigma:
        raise WireError(f"privacy.least_sigma must be at least {LEAST_SIGMA:g} and at most privacy.sigma")
    if request.plan.records is not None and request.privacy.unit != "record":
        raise WireError("plan.records goes with privacy.unit = 'record'")
    for name, array in (("x", request.x), ("record.row", record.row), ("public", request.public)):
        if array is not None and float(np.abs(array).max()) > LARGEST_NUMBER:
            raise WireError(f"{name} must hold numbers of at most {LARGEST_NUMBER:g}")
    if record.row is not None and (record.row.shape != request.x.shape or record.row.dtype != request.x.dtype):
        raise WireError("record.row must have the shape and dtype of x")
    if request.public is not None and request.public.dtype != request.x.dtype:
        raise WireError("public must have the dtype of x")


def _flat(value: Any, prefix: str) -> Fields:
    table: Fields = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if is_dataclass(item):
            table |= _flat(item, f"{prefix}{field.name}.")
        elif item is not None:
            table[prefix + field.name] = item
    return table


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a message's fields; resolving their names takes longer than reading a message."""
    return get_type_hints(kind)


def _built(kind: type[Kind], rest: dict[str, Any], prefix: str, largest: int) -> Kind:
    """Build a dataclass from fields of the table, which are removed from it."""
    hints, found = _hints(cast(Any, kind)), {}
    for field in fields(cast(Any, kind)):
        hint, name = hints[field.name], prefix + field.name
        inner = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        if inner is not None:
            if inner is hint or any(key.startswith(f"{name}.") for key in rest):
                found[field.name] = _built(cast(type[Any], inner), rest, f"{name}.", largest)
            continue
        optional = hint in (Array | None, Octets | None, float | None)
        if name not in rest:
            if not optional:
                raise WireError(f"{name} is missing")
            continue
        item = rest.pop(name)
        if hint in (Octets, Octets | None):
            found[field.name] = _octets(name, item, most_octets(largest))
        elif hint in (Array, Array | None):
            found[field.name] = _array(name, item, largest)
        else:
            found[field.name] = _scalar(name, item, hint)
    return kind(**found)


def _scalar(name: str, item: Any, hint: Any) -> int | float | str | bool:
    wanted = float if hint == float | None else hint
    if type(item) is not wanted:  # exactly, because a bool is not accepted as an int
        raise WireError(f"{name} must be a {wanted.__name__}")
    if wanted is int and not 0 <= item < 2**63:
        raise WireError(f"{name} must be a whole number from 0 to 2^63 - 1")
    if wanted is float and not np.isfinite(item):
        raise WireError(f"{name} must be finite")
    if name in LIMITS and not LIMITS[name][0] <= item <= LIMITS[name][1]:
        raise WireError(f"{name} must lie between {LIMITS[name][0]:g} and {LIMITS[name][1]:g}")
    longest = LONGEST_SPEC if name == "method.spec" else _LONGEST
    if isinstance(item, str) and (len(item) > longest or not _PATTERNS.get(name, _WORD).fullmatch(item)):
        raise WireError(f"{name} must be a short word of the expected form")
    return cast(int | float | str | bool, item)


def _array(name: str, item: Any, largest: int) -> Array:
    if type(item) is not np.ndarray:
        raise WireError(f"{name} must be an array")
    if item.dtype not in FLOATS:
        raise WireError(f"{name} must be float32 or float64")
    if item.ndim != 1 or not 1 <= item.size <= largest:
        raise WireError(f"{name} must be a vector of 1 to {largest} numbers")
    if not bool(np.isfinite(item).all()):
        raise WireError(f"{name} must be finite")
    return np.ascontiguousarray(item)


def _octets(name: str, item: Any, most: int) -> Octets:
    if type(item) is not np.ndarray or item.dtype != OCTETS or item.ndim != 1 or not 1 <= item.size <= most:
        raise WireError(f"{name} must be 1 to {most} bytes")
    return item
