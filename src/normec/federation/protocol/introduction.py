"""The introduction of a party to the server: the roster that the party pinned, signed with the party's key.

The server has no roster of its own. It takes the one that all parties have, and learns from the signatures which of
Flower's nodes is which party. A server that lies about it gains nothing: parties check every key against their own
roster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...errors import UsageError, WireError
from ..secure_sum.keys import KEY, SIGNATURE, Identity, signed_by
from ..secure_sum.roster import MOST, Member, Roster

_PURPOSE = "introduction"


class Introduction(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The members of a party's roster in their order, the party's number among them, and its signature."""

    members: Annotated[
        tuple[tuple[Annotated[str, Meta(max_length=64)], Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]], ...],
        Meta(max_length=MOST),
    ]
    number: Annotated[int, Meta(ge=0, lt=MOST)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE, max_length=SIGNATURE)]


def introduce(identity: Identity, roster: Roster, run: str, node: str) -> Introduction:
    """The introduction of the party with this key, for one run and one node."""
    members = tuple((member.name, member.key) for member in roster.members)
    signature = identity.sign(_PURPOSE, _signed(roster, run, node))
    return Introduction(members, roster.number(identity.public), signature)


def introduced(content: bytes, run: str, node: str) -> tuple[Roster, int]:
    """The roster of a party and its number there.

    Raises:
        WireError: The content is no introduction, or its signature is not that of the party.
    """
    try:
        found = msgspec.msgpack.decode(content, type=Introduction)
        roster = Roster(tuple(Member(name, key) for name, key in found.members))
    except (msgspec.DecodeError, UnicodeDecodeError, UsageError) as error:
        raise WireError(f"it contains no roster: {str(error)[:200]}") from None
    if found.number >= len(roster):
        raise WireError("its number is not in its roster")
    if not signed_by(roster.members[found.number].key, _PURPOSE, _signed(roster, run, node), found.signature):
        raise WireError("its introduction is not signed with its key in the roster")
    return roster, found.number


def agreed(found: Mapping[str, tuple[Roster, int]]) -> tuple[Roster, list[str]]:
    """The roster of all parties, and their nodes in its order.

    Raises:
        UsageError: Two parties have different rosters or the same number, or somebody is missing.
    """
    first, (roster, _) = next(iter(found.items()))
    nodes: dict[int, str] = {}
    for node, (own, number) in found.items():
        if own != roster:
            raise UsageError(
                f"{node} has another roster than {first}; the parties must exchange their files and compare them"
            )
        if number in nodes:
            raise UsageError(f"{node} and {nodes[number]} use the same key in the roster; each party needs its own")
        nodes[number] = node
    if len(nodes) != len(roster):
        missing = ", ".join(member.name for i, member in enumerate(roster.members) if i not in nodes)
        raise UsageError(
            f"the roster has {len(roster)} parties, the run {len(nodes)}; missing: {missing}; all must take part"
        )
    return roster, [nodes[number] for number in range(len(roster))]


def _signed(roster: Roster, run: str, node: str) -> bytes:
    return msgspec.msgpack.encode((roster.digest, run, node))
