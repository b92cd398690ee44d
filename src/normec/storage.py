"""A run's folder as training sees it: its lock, its history, its checkpoint, its releases and its secrets."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from .atomic import OWNER_ONLY, read_file, write_atomic
from .checkpoint import CURE, LATEST, Checkpoints
from .errors import UsageError
from .history import History
from .releases import Releases


class FolderLock:
    """A folder that one process at a time writes in; the system gives the lock back when the process dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        """Make the folder and lock it; remove what a killed process left half-written there."""
        if self._file is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / ".lock").open("ab")
        except OSError as error:
            raise UsageError(f"cannot write to {self._folder}: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UsageError(f"another process is training in {self._folder}; wait for it or choose another") from None
        self._file = lock
        for left in self._folder.glob(".*.part"):
            if left.is_file():
                left.unlink(missing_ok=True)

    def give_back(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RunStorage:
    """Writes nothing until `open`; without a folder (`out=None`) it keeps the history in memory only.

    In a private run (`identity["privacy"]` is set) only the owner may read the history, the checkpoint, the releases
    and the secrets, whatever the umask.
    """

    def __init__(self, out: Path | None, identity: dict[str, Any]) -> None:
        self.out = out
        private = identity.get("privacy") is not None
        self.history = History(out / "metrics.jsonl" if out is not None else None, OWNER_ONLY if private else 0o666)
        self.releases = Releases(out / "checkpoint" / "releases.jsonl" if out is not None else None)
        self._checkpoints = Checkpoints(out / "checkpoint", identity, private) if out is not None else None
        self._lock = FolderLock(out) if out is not None else None

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint, with the history as it was then, and the releases since."""
        if self.out is None or self._checkpoints is None or not self.out.exists():
            return None
        self.open()
        found = self._checkpoints.load()
        if not self._checkpoints.begun:
            self._refuse_remains(self.out)
        self.releases.load()
        self.history.rewind(found[1]["metrics"] if found else None)
        return found

    def open(self) -> None:
        """Make the folder and take it: one process at a time writes here."""
        if self._lock is not None:
            self._lock.take()

    def begin(self) -> None:
        """Before the first row, release or checkpoint: from now on the folder is this run's."""
        if self._checkpoints is not None:
            self.open()
            self._checkpoints.begin()

    def save(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if self._checkpoints is not None:
            self.begin()
            self._checkpoints.save(round, tensors, {"metrics": self.history.flush(), **facts})
            self.releases.forget(round)

    def secret(self, name: str, draw: Callable[[], bytes]) -> bytes:
        """The secret `name` of this run: what `draw` gives, kept for its owner alone, the same after every restart.

        To be asked for before `begin`, so before anything is released. A run that has begun and has lost its secret is
        refused: another one would not go on with the same run. Without a folder nothing is kept.
        """
        if self.out is None or self._checkpoints is None:
            return draw()
        self.open()
        path = self.out / name
        held = read_file(path)
        if not held:
            if self._checkpoints.begun:
                raise UsageError(f"{path} is {'missing' if held is None else 'empty'}; {CURE}")
            held = draw()
            write_atomic(path, held, OWNER_ONLY)
        return held

    def close(self) -> None:
        if self._lock is not None:
            self._lock.give_back()

    def _refuse_remains(self, out: Path) -> None:
        """Refuse rows or releases of a run whose checkpoint folder is gone: starting at round 0 would lose them."""
        ledger = read_file(out / "ledger.jsonl") or b""
        for name, found in (
            ("metrics.jsonl", bool(read_file(out / "metrics.jsonl"))),
            ("ledger.jsonl", ledger.count(b"\n") > 1),
        ):
            if found:
                raise UsageError(f"{out / 'checkpoint' / LATEST} is missing beside {name}; {CURE}")
