"""The folder of a run: its lock, the history, the newest checkpoint, and the secret of the noise."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import UsageError
from ..system.files import read_if_present, to_toml, write_atomic
from ..system.processes import process_identity
from .checkpoint import CURE, LATEST, Checkpoints
from .history import History
from .releases import Releases

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.toml"
SCHEMA = "schema.toml"  # the description of the columns of the table that a run was trained on
MODEL = "model.safetensors"  # the final model, under the names of its state_dict
FEDERATION = "federation"  # the engine of a run between parties, whose model is code of their app


class FolderLock:
    """The lock of a folder in which one process at a time writes; the system releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._owner = process_identity()

    def acquire(self) -> None:
        """Create and lock the folder, and remove incomplete files of a killed process."""
        if self._file is not None:
            self._refuse_forks()
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Whoever can open the file can hold its lock: the owner and the group, and nobody else.
            lock = os.fdopen(os.open(self._folder / ".lock", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o660), "ab")
        except OSError as error:
            raise UsageError(f"cannot write to {self._folder}: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UsageError(
                f"another process writes to {self._folder}; wait for it or choose another folder"
            ) from None
        self._file, self._owner = lock, process_identity()
        for left in self._folder.glob(".*.part"):
            if left.is_file():
                left.unlink(missing_ok=True)

    def _refuse_forks(self) -> None:
        """Refuse a forked child, which inherits the lock but must not write at the same time as its parent."""
        if process_identity() != self._owner:
            raise UsageError(
                f"{self._folder} was opened by process {self._owner[1]} and this is process {os.getpid()}, a fork"
                " of it; choose another folder for the run in this process"
            )

    def release(self) -> None:
        if self._file is not None:
            if process_identity() == self._owner:
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing the file would leave the lock with a forked child
            self._file.close()
            self._file = None


def stored_secret(folder: Path) -> int | None:
    """Return the secret of the noise of the run in a folder; None if no run has begun there, or it has no secret.

    A secret without a run belongs to a run that was removed; another run must not use it again.
    """
    path = _secret_file(folder)
    held = read_if_present(path) if (folder / "checkpoint" / LATEST).exists() else None
    if held is None:
        return None
    if not re.fullmatch(rb"[0-9a-f]{32}\n", held):
        raise UsageError(f"{path} is damaged, and the run cannot continue without its secret; {CURE}")
    return int(held, 16)


def _secret_file(folder: Path) -> Path:
    return folder / ".noise-secret"


class RunStorage:
    """The files of one run. Nothing is written before `open`; without a folder (`out=None`) there is only the history.

    In a private run (`identity["privacy"]` is set) only the owner can read the history, the checkpoint, the releases
    and the secret, whatever the umask is.
    """

    def __init__(
        self,
        out: Path | None,
        identity: dict[str, Any],
        secret: int | None = None,
        previous: dict[str, Any] | None = None,
    ) -> None:
        """`secret` is stored in the folder from the start, so that a resumed run draws the noise that it paid for.

        `previous` is the identity of a run with fewer rounds, if this one continues it.

        The attribute `settings` holds the contents of config.toml: every setting with the value that is used.
        """
        self.out, self._secret = out, secret
        self.settings: Mapping[str, Any] = {}
        private = identity.get("privacy") is not None
        self.history = History(out / "metrics.jsonl" if out is not None else None, private=private)
        self.releases = Releases(out / "checkpoint" / "releases.jsonl" if out is not None else None)
        self._checkpoints = Checkpoints(out / "checkpoint", identity, private, previous) if out is not None else None
        self._continues = previous is not None
        self._lock = FolderLock(out) if out is not None else None

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Load the newest checkpoint, the history up to it, and the releases since."""
        if self.out is None or self._checkpoints is None or not self.out.exists():
            return None
        self.open()
        found = self._checkpoints.load()
        if not self._checkpoints.begun:
            self._refuse_remains(self.out)
        self.releases.load()
        self.history.rewind(found[1]["metrics"] if found else None)
        return found

    @property
    def begun(self) -> bool:
        """Whether this run has begun in the folder."""
        return self._checkpoints is not None and self._checkpoints.begun

    def open(self) -> None:
        """Create and lock the folder."""
        if self._lock is not None:
            self._lock.acquire()

    def begin(self) -> None:
        """Claim the folder for this run, before the first row, release or checkpoint."""
        if self.out is not None and self._checkpoints is not None:
            self.open()
            self._write_secret(self.out)
            self._checkpoints.begin()

    def write_settings(self) -> None:
        """Lock the folder and write config.toml, the first file of a run, once per run and when it is continued."""
        self.open()
        written = self.out is not None and self.begun and (self.out / CONFIG).exists() and not self._continues
        if self.out is None or not self.settings or written:
            return
        write_atomic(self.out / CONFIG, to_toml(self.settings))

    def withdraw_settings(self) -> None:
        """Remove config.toml again, if a callback refuses the run before it begins; the folder then holds no run."""
        if self.out is not None and not self.begun:
            (self.out / CONFIG).unlink(missing_ok=True)

    def _write_secret(self, folder: Path) -> None:
        if self._secret is None:
            return
        if not self.begun:
            write_atomic(_secret_file(folder), f"{self._secret:032x}\n", private=True)
        elif stored_secret(folder) != self._secret:
            raise UsageError(f"another process began a run in {folder}; start again to continue it")

    def save(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if self._checkpoints is not None:
            self.begin()
            self._checkpoints.save(round, tensors, {"metrics": self.history.flush(), **facts})
            self.releases.forget(round)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _refuse_remains(self, out: Path) -> None:
        """Refuse rows or releases of a run without a checkpoint folder, because starting at round 0 would lose them."""
        ledger = read_if_present(out / "ledger.jsonl") or b""
        for name, found in (
            ("metrics.jsonl", bool(read_if_present(out / "metrics.jsonl"))),
            ("ledger.jsonl", ledger.count(b"\n") > 1),
        ):
            if found:
                raise UsageError(f"{out / 'checkpoint' / LATEST} is missing beside {name}; {CURE}")
