"""A run's folder as training sees it: who may write, the history's file, the newest checkpoint."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from .atomic import write_atomic
from .checkpoint import Checkpoints
from .errors import UsageError
from .history import History


def _secret_file(folder: Path) -> Path:
    return folder / ".noise-secret"


def kept_secret(folder: Path) -> int | None:
    """The secret that a run's noise comes from, where its folder keeps one."""
    path = _secret_file(folder)
    try:
        return int(path.read_text(encoding="ascii"), 16)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read; the run cannot go on without its secret") from None


class RunStorage:
    """Writes nothing until `open`; without a folder (`out=None`) it keeps the history in memory only."""

    def __init__(self, out: Path | None, identity: dict[str, Any], secret: int | None = None) -> None:
        """`secret`: kept in the folder from the start, so that a resumed run draws the noise that it paid for."""
        self.out, self._secret = out, secret
        self.history = History(out / "metrics.jsonl" if out is not None else None)
        self._checkpoints = Checkpoints(out / "checkpoint", identity) if out is not None else None
        self._lock: IO[bytes] | None = None
        self._owner = os.getpid()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint, with the history as it was then."""
        if self.out is None or self._checkpoints is None or not self.out.exists():
            return None
        self.open()
        found = self._checkpoints.load()
        self.history.rewind(found[1]["metrics"] if found else None)
        return found

    def open(self) -> None:
        """Make the folder and take it: one process at a time writes here."""
        if self.out is None:
            return
        if self._lock is not None:
            self._refuse_forks()
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = (self.out / ".lock").open("ab")
        except OSError as error:
            raise UsageError(f"cannot write to {self.out}: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UsageError(f"another process is training in {self.out}; wait for it or choose another") from None
        self._lock, self._owner = lock, os.getpid()
        for left in self.out.glob(".*.part"):
            left.unlink(missing_ok=True)  # what a kill left half-written
        if self._secret is not None:
            self._keep_secret(self._secret)

    def _keep_secret(self, secret: int) -> None:
        path = _secret_file(self.out) if self.out is not None else None
        if path is None:
            return
        known = kept_secret(path.parent)
        if known is None:
            write_atomic(path, f"{secret:032x}\n", private=True)
        elif known != secret:
            raise UsageError(f"another process began a run in {path.parent}; start again to go on with it")

    def save(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if self._checkpoints is not None:
            self.open()
            self._checkpoints.save(round, tensors, {"metrics": self.history.flush(), **facts})

    def _refuse_forks(self) -> None:
        """A forked child inherits the lock, but not the right to write beside its parent."""
        if os.getpid() != self._owner:
            raise UsageError(
                f"{self.out} was opened by process {self._owner} and this is process {os.getpid()}, a fork of it;"
                " choose another folder for a run in this process"
            )

    def close(self) -> None:
        if self._lock is not None:
            if os.getpid() == self._owner:
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing alone would leave the lock with a forked child
            self._lock.close()
            self._lock = None
