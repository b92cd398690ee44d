"""A party's state of one run on its disk: memory g_i, what the server has of it, and the message under way.

One safetensors file, replaced in one step; its checksum is inside. A file that is damaged counts as lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic import write_atomic
from ..errors import UsageError

_FORMAT = 1
_PATIENCE = 120.0  # seconds: a request that comes while another is being answered waits for it


@dataclass(frozen=True)
class Pending:
    """A message that was made and paid for, and is not known to be accepted.

    `terms`: what covers it (`PrivacyTerms.cover`). `sent` is what leaves; `taken` what the memory takes once it was
    accepted (the same, or the message without noise).
    """

    round: int
    terms: str
    digest: str
    sent: Tensor
    taken: Tensor
    loss: float | None


@dataclass(frozen=True)
class PartyState:
    """`memory` holds at the beginning of round `since`. A `token` without a memory: the party has said hello and waits.

    `paid`: what the account had for this run when the state was written; `clean`: messages made without noise.
    """

    token: str
    memory: Tensor | None = None
    accepted: int = 0
    since: int = 0
    digest: str = ""
    paid: int = 0
    clean: int = 0
    pending: Pending | None = None

    @property
    def newest(self) -> int:
        """The newest round this state knows of: a request of an older one was overtaken."""
        return max(self.since, self.pending.round if self.pending is not None else 0)


def path_of(folder: Path, run: str, node: str) -> Path:
    return folder / "runs" / run / f"{node}.safetensors"


def save(path: Path, state: PartyState) -> None:
    from safetensors.torch import save as packed

    facts: dict[str, Any] = {
        name: getattr(state, name) for name in ("token", "accepted", "since", "digest", "paid", "clean")
    }
    tensors: dict[str, Tensor] = {}
    if state.memory is not None:
        tensors["memory"] = state.memory
    if state.pending is not None:
        facts["pending"] = {name: getattr(state.pending, name) for name in ("round", "terms", "digest", "loss")}
        tensors["sent"] = state.pending.sent
        if state.pending.taken is not state.pending.sent:
            tensors["taken"] = state.pending.taken
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, **facts})
    whole = packed(tensors, metadata={"state": text, "sha256": _checksum(text, tensors)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, whole)


def load(path: Path) -> PartyState | None:
    """The state; None where there is none. Raises `UsageError` where it is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            kept = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        if kept.get("sha256") != _checksum(kept.get("state", ""), tensors):
            raise UsageError(f"{path} is damaged: its checksum differs")
        facts = json.loads(kept["state"])
        if facts.pop("format") != _FORMAT:
            raise UsageError(f"{path} is of another version")
        under_way = facts.pop("pending", None)
        pending = None
        if under_way is not None:
            sent = tensors["sent"]
            pending = Pending(**under_way, sent=sent, taken=tensors.get("taken", sent))
        return PartyState(**facts, memory=tensors.get("memory"), pending=pending)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"/{name}/{tensors[name].dtype}/".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """The folder for oneself: one request is answered at a time, whichever process it reaches."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise UsageError(
                        f"{folder} has been in use for {_PATIENCE:g} s; is another party at work?"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)
