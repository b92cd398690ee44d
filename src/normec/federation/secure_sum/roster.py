"""The roster of a secure sum: the parties and their public keys, in a file that the parties exchange among themselves.

The server registers nodes and could play every other party, so no party takes another's key from the server. Each
party sends its key to the others by a way that the server does not control, and the owners compare fingerprints by
telephone. The order in the file numbers the parties.

    [[party]]
    name = "hospital-a"
    key = "d75a980182b10ab7…"          # 64 hexadecimal digits
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...errors import UsageError
from ...system.files import read_toml, write_atomic
from .keys import KEY, digest

FEWEST, MOST = 3, 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST_FILE = 2**17


@dataclass(frozen=True)
class Member:
    """A party by its name and its Ed25519 public key."""

    name: str
    key: bytes

    @property
    def fingerprint(self) -> str:
        """128 bits of the key's SHA-256 in groups of four digits, to be compared by people."""
        text = hashlib.sha256(self.key).hexdigest()[:32]
        return " ".join(text[start : start + 4] for start in range(0, 32, 4))


@dataclass(frozen=True)
class Roster:
    """The parties of a run, numbered from 0 in this order."""

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not FEWEST <= len(self.members) <= MOST:
            raise UsageError(f"a secure sum has {FEWEST} to {MOST} parties, the roster has {len(self.members)}")
        for member in self.members:
            if not _NAME.fullmatch(member.name):
                raise UsageError(f"{member.name!r} cannot be a party's name; use at most 64 letters, digits, '.-_'")
            if len(member.key) != KEY:
                raise UsageError(f"the key of {member.name} must have {KEY} bytes, it has {len(member.key)}")
        for what in ("name", "key"):
            if len({getattr(member, what) for member in self.members}) < len(self.members):
                raise UsageError(f"two parties of the roster have the same {what}; every party needs its own")

    def __len__(self) -> int:
        return len(self.members)

    @property
    def digest(self) -> bytes:
        """A hash of all names and keys in their order, which the terms of a run contain."""
        plain = json.dumps([[member.name, member.key.hex()] for member in self.members], separators=(",", ":"))
        return digest("roster", plain.encode())

    def number(self, key: bytes) -> int:
        """The number of the party with this public key. Raises `UsageError` if the roster does not contain it."""
        for number, member in enumerate(self.members):
            if member.key == key:
                return number
        raise UsageError("this party's key is not in the roster; send your public key to the others, and compare files")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a roster file. Raises `UsageError` if it is not one."""
        try:
            table = read_toml(path, _LARGEST_FILE)
        except FileNotFoundError:
            raise UsageError(f"there is no roster at {path}; the parties write one and compare fingerprints") from None
        entries = table.get("party")
        if set(table) != {"party"} or not isinstance(entries, list):
            raise UsageError(f"{path} is not a roster: it must hold tables [[party]] and nothing else")
        return cls(tuple(_member(entry, path) for entry in entries))

    def save(self, path: Path) -> None:
        write_atomic(path, "\n".join(map(entry, self.members)))


def entry(member: Member) -> str:
    """A party as a roster file shows it."""
    return f'[[party]]  # fingerprint {member.fingerprint}\nname = "{member.name}"\nkey = "{member.key.hex()}"\n'


def _member(entry: Any, path: Path) -> Member:
    if not isinstance(entry, dict) or set(entry) != {"name", "key"}:
        raise UsageError(f"{path}: a party has a name and a key, and nothing else")
    name, key = entry["name"], entry["key"]
    if not isinstance(name, str) or not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise UsageError(f"{path}: a key must be 64 hexadecimal digits, for party {name!r} it is not")
    return Member(name, bytes.fromhex(key))
