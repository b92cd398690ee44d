"""A party's state of one run on its disk: its client state, the accepted messages, and the pending message.

The state is one safetensors file with a checksum inside, and it is replaced atomically. A damaged file counts as lost.

Every state also holds the head that the party's ledger had when the state was written. So a ledger that was truncated,
rolled back or deleted is detected (`newest_ledger`). The number of states in a folder is limited (`MOST_RUNS`,
`MOST_WAITING`), because a server can invent any number of runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.method import Tables
from ...errors import UsageError
from ...privacy.hash_chain import Head
from ...system.files import PRIVATE_FILE, private_folder, write_atomic

MOST_RUNS = 100  # states of runs for which the party has made a message
MOST_WAITING = 32  # states that wait for the server's record; the oldest are dropped for new ones
_FOLDER, _SUM = "runs", "~sum.safetensors"
_FORMAT = 4
_FACTS = ("token", "accepted", "since", "digest", "ledger", "released")  # of a state, beside its tensors
_PENDING_FACTS = ("round", "terms", "digest", "loss", "released")
_BLAKE, _SHA = "blake2b", "sha256"  # the function of the checksum: the faster one, and that of files before it
_PATIENCE = 120.0  # seconds that a request waits while another one is answered


@dataclass(frozen=True)
class Pending:
    """A message that was made and paid for, and that is not known to be accepted.

    `terms` identifies the noise that covers it (`Request.cover`). `sent` is the message that leaves the party. `taken`
    is the message with which the client state is updated once it is accepted: the same one, or the one without noise.
    `draft` is what the method will commit; a table that the message does not change is shared with the client state and
    written once. `released`: whether `taken` left the party with noise, and the method keeps nothing but messages.
    """

    round: int
    terms: str
    digest: str
    sent: Tensor
    taken: Tensor
    draft: Tables
    loss: float | None
    released: bool = False


@dataclass(frozen=True)
class PartyState:
    """The state of a party in one run.

    `client` holds tables of one row, valid at the beginning of round `since`; it is None while the party waits for the
    server's record. `ledger` is the head of the party's ledger when the state was written. `released`: whether `client`
    was updated with nothing but messages that left the party with noise.
    """

    token: str
    client: Tables | None = None
    accepted: int = 0
    since: int = 0
    digest: str = ""
    ledger: Head | None = None
    released: bool = False
    pending: Pending | None = None

    @property
    def newest(self) -> int:
        """The newest round that this state knows; a request for an older round is outdated."""
        return max(self.since, self.pending.round if self.pending is not None else 0)


def path_of(folder: Path, run: str, node: str) -> Path:
    """The file of the state of a run in which every message is sent by itself."""
    return folder / _FOLDER / run / f"{node}.safetensors"


def sum_path_of(folder: Path, run: str, node: str) -> Path:
    """The file of the state of a run with secure sums, which no request for a single message may reach.

    A server can use the name of a run for both. What a sum has added to a memory has no noise of its own, so a memory
    of single messages would no longer consist of what was released. No party has a name with a "~".
    """
    return folder / _FOLDER / run / f"{node}{_SUM}"


def sum_paths_of(folder: Path, run: str) -> list[Path]:
    """The files of the states of a run with secure sums, under all names that the party has had in it."""
    return sorted((folder / _FOLDER / run).glob(f"*{_SUM}"))


def of_messages(inside: Path) -> bool:
    """Whether a path inside of a party's folder is that of a state of single messages."""
    return inside.parts[0] == _FOLDER and not inside.name.endswith(_SUM)


def save(path: Path, state: PartyState) -> PartyState:
    """Write the state. Returns it as `load` would, with tensors of its own, so that it need not be read again."""
    from safetensors.torch import save as packed

    facts: dict[str, Any] = {name: getattr(state, name) for name in _FACTS}
    facts["waiting"] = state.client is None
    tensors: dict[str, Tensor] = {f"client.{name}": rows for name, rows in (state.client or {}).items()}
    if state.pending is not None:
        facts["pending"] = {name: getattr(state.pending, name) for name in _PENDING_FACTS}
        tensors["sent"] = state.pending.sent
        kept = state.client or {}
        for name, rows in state.pending.draft.items():
            if rows is not kept.get(name):
                tensors[f"draft.{name}"] = rows
        if state.pending.taken is not state.pending.sent:
            tensors["taken"] = state.pending.taken
    dense = torch.contiguous_format  # a row that was expanded would keep its stride of 0
    tensors = {name: tensor.detach().clone(memory_format=dense) for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, **facts})
    whole = packed(tensors, metadata={"state": text, _BLAKE: _checksum(text, tensors, _BLAKE)})
    private_folder(path.parent)
    write_atomic(path, whole, private=True)
    return _read(text, tensors)


def identity(path: Path) -> tuple[int, ...] | None:
    """A value that changes whenever the file is written, replaced or restored; None if there is no file."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size
    return None


def load(path: Path) -> PartyState | None:
    """Read the state; None if there is none. Raises `UsageError` if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            kept = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        text, function = kept.get("state", ""), _BLAKE if _BLAKE in kept else _SHA
        if kept.get(function) != _checksum(text, tensors, function):
            raise ValueError("its checksum differs")
        written = json.loads(text)["format"]
        state = _read(text, tensors) if written == _FORMAT else None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if state is None:
        raise UsageError(
            f"{path} has format {written}, this version of normec reads {_FORMAT}; use the one that wrote it"
        )
    return state


def _read(text: str, tensors: dict[str, Tensor]) -> PartyState:
    """The state of which these are the facts and the tensors."""
    facts = json.loads(text)
    del facts["format"]
    under_way = facts.pop("pending", None)
    pending = None
    if under_way is not None:
        sent = tensors["sent"]
        draft = _named(tensors, "client.") | _named(tensors, "draft.")
        pending = Pending(**under_way, sent=sent, taken=tensors.get("taken", sent), draft=draft)
    facts["ledger"] = _head(facts)
    client = None if facts.pop("waiting") else _named(tensors, "client.")
    return PartyState(**facts, client=client, pending=pending)


def newest_ledger(folder: Path) -> Head | None:
    """The head of the longest ledger that a state in the folder knows."""
    known = [head for path in _paths(folder) if (head := _head(_facts(path))) is not None]
    return max(known, default=None)


def make_room(folder: Path) -> None:
    """Make sure that the folder can hold the state of one more run.

    States that wait for the server's record are dropped, the oldest first. Raises `UsageError` if there are too many
    states of runs to which the party has sent messages.
    """
    waiting = [path for path in _paths(folder) if _facts(path).get("waiting")]
    for path in sorted(waiting, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(waiting) - MOST_WAITING + 1)]:
        path.unlink()
        with suppress(OSError):  # the party may have other names in this run
            path.parent.rmdir()
    if len(_paths(folder)) - len(waiting) >= MOST_RUNS:
        raise UsageError(
            f"{folder / _FOLDER} holds {MOST_RUNS} runs, the largest number allowed; remove those that are over"
        )


def _paths(folder: Path) -> list[Path]:
    return sorted((folder / _FOLDER).glob("*/*.safetensors"))


def _facts(path: Path) -> dict[str, Any]:
    """The metadata of a state, without its tensors; empty if the file is damaged or gone.

    The party may replace the file at any moment while others show what it has spent. `safe_open` opens a file twice, so
    the header alone is read here, from one open file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > os.fstat(file.fileno()).st_size:
                return {}
            facts: dict[str, Any] = json.loads(json.loads(file.read(length))["__metadata__"]["state"])
            return facts
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return {}


def _named(tensors: dict[str, Tensor], prefix: str) -> Tables:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _head(facts: dict[str, Any]) -> Head | None:
    return Head(*facts["ledger"]) if facts.get("ledger") else None


def _checksum(text: str, tensors: dict[str, Tensor], function: str) -> str:
    digest = hashlib.new(function, text.encode())
    for name in sorted(tensors):
        digest.update(f"/{name}/{tensors[name].dtype}/".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).reshape(-1).numpy().data)
    return digest.hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one request is answered at a time, whichever process receives it."""
    private_folder(folder)
    handle, owner = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE), os.getpid()
    try:
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise UsageError(
                        f"{folder} has been in use for {_PATIENCE:g} s; stop the other process that uses it"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        if os.getpid() == owner:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave the lock with a forked child
        os.close(handle)
