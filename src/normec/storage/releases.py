"""The noisy sums that a private run has released since its last checkpoint.

    checkpoint/releases.jsonl    one line per round: the round, its attempt in the ledger, the sum (base64), a checksum

Secure noise cannot be repeated, so a killed run would have to pay again for every round since its last checkpoint. The
guarantee allows everyone to know what was released, so it may be stored: a resumed run computes the messages of such a
round again, to update the clients' memories, and reads the sum from this file. Nothing is drawn, released or paid for
twice. A round that was paid for but has no line here, because the run was killed during the round, is paid for again.

A line has the size of the model, not of the clients' memories. A checkpoint is written as soon as the lines take more
space than the checkpoint itself and more than one mebibyte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..system.files import append, flush, open_file, writing
from .checkpoint import CURE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Entry:
    """The position of a round's line in the file."""

    attempt: int
    start: int
    length: int


class Releases:
    """The file of a run's releases; without a path nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: dict[int, _Entry] = {}
        self.size = 0

    def append(self, round: int, attempt: int, total: Tensor) -> None:
        """Write what `round` has released, and sync it to the disk."""
        if self._path is None:
            return
        held = total.detach().cpu().contiguous()
        facts = {"round": round, "attempt": attempt, "dtype": str(held.dtype).removeprefix("torch.")}
        facts["sum"] = base64.b64encode(held.numpy().tobytes()).decode()
        line = json.dumps(facts | {"sha256": _checksum(facts)}).encode() + b"\n"
        append(self._path, line, private=True)
        with writing(self._path):
            flush(self._path)
            if not self.size:
                flush(self._path.parent)
        self._entries[round] = _Entry(attempt, self.size, len(line))
        self.size += len(line)

    def load(self) -> None:
        """Find and check the lines in the file; an incomplete last line of a killed process is removed."""
        self._entries, self.size = {}, 0
        if self._path is None or not self._path.exists():
            return
        with open_file(self._path) as file:
            whole = True
            for line in file:
                if not whole:
                    raise UsageError(f"{self._path} is damaged; {CURE}")
                facts = _parsed(line) if line.endswith(b"\n") else None
                whole = facts is not None
                if facts is not None:
                    self._entries[facts["round"]] = _Entry(facts["attempt"], self.size, len(line))
                    self.size += len(line)
        if not whole:
            with writing(self._path):
                os.truncate(self._path, self.size)

    def following(self, round: int) -> list[int]:
        """Return the attempts of `round` and of the rounds after it, up to the first gap."""
        found: list[int] = []
        while round + len(found) in self._entries:
            found.append(self._entries[round + len(found)].attempt)
        return found

    def read(self, round: int, like: Tensor) -> Tensor:
        """Return what `round` has released, on the device of `like`."""
        entry = self._entries[round]
        if self._path is None or not self._path.exists():
            raise UsageError(f"{self._path} is missing; {CURE}")
        with open_file(self._path) as file:
            file.seek(entry.start)
            facts = _parsed(file.read(entry.length))
        if facts is None:
            raise UsageError(f"{self._path} is damaged; {CURE}")
        data = bytearray(base64.b64decode(facts["sum"]))
        import torch

        return torch.frombuffer(data, dtype=getattr(torch, facts["dtype"])).to(like.device)

    def forget(self, round: int) -> None:
        """Forget the rounds before `round`, which a checkpoint covers now; an empty file is removed."""
        self._entries = {known: entry for known, entry in self._entries.items() if known >= round}
        if self._path is not None and not self._entries:
            with writing(self._path):
                self._path.unlink(missing_ok=True)
            self.size = 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the contents of a line; None if it is damaged."""
    try:
        facts: dict[str, Any] = json.loads(line)
        return facts if facts.pop("sha256") == _checksum(facts) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
