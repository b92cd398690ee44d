"""A hash chain: an append-only file of JSON lines, used by one process at a time, in which changes are detected.

On disk. `NAME` holds one JSON object per line, each with `hash` = SHA-256(hash of the line before + the rest of the
line); `NAME.head` holds the number of lines and the last hash, replaced atomically after each append. A `witness`, if
there is one, is a copy of `NAME.head` at a path outside the file's folder, replaced last. `append` returns when the
line and the witness are on the disk. A power cut may bring back an older `NAME.head`, which counts fewer lines than
there are. Only their owner can read and write new files (mode 0600).

Which changes are detected when the file is opened:
| change | detected |
| --- | --- |
| a line changed, removed in the middle, or exchanged | yes, the hashes do not match |
| lines removed from the end | yes, `NAME.head` (or the caller's `expect`) counts more lines |
| `NAME` deleted, `NAME.head` kept | yes |
| `NAME.head` deleted, releases present | yes, it must be there |
| `NAME` and `NAME.head` restored together to an older state (a backup, a snapshot) | only with a `witness` that was not
restored with them, or with `expect` (the `Head` in a checkpoint) |
| everything deleted, so that the file begins anew | only with a `witness` |
| everything rewritten consistently | only with a `witness`, `expect`, or `secret` (an HMAC instead of a hash) |
| the witness or the checkpoint rewritten as well | only with `secret` |
| the witness, the file and its head all restored to the same older state | no |

If the witness counts more lines than the file, lines were lost. If it counts more than one line less, the witness
itself was restored, or the file was used without it; one line less is what a crash between the two writes leaves. Both
are refused. To begin a witness for a file that already has lines, copy `NAME.head` to the path of the witness.

One process. The lock belongs to the process that opened the file. A forked child inherits the lock and
could write at the same time as its parent. Therefore `append` refuses in every process except the one that opened the
file, and a chain cannot be pickled. A file that was deleted or replaced while it was open is refused as well.

A torn line, left by a crash during `append`, is the last line of the file, is not complete JSON, and is not counted by
`NAME.head`. Since `append` had not returned, nothing that depends on it has happened, and the line is dropped. A
complete line that `NAME.head` does not count yet is kept, and the head is updated when the file is opened.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from ..errors import UsageError
from ..system.files import PRIVATE_FILE, flush, read_bytes
from ..system.processes import process_identity


class LedgerDamaged(RuntimeError):  # noqa: N818  (a state of the file, not of the program)
    """The file was changed, truncated, or rolled back."""


class LedgerInUse(RuntimeError):  # noqa: N818
    """Another process has the file open."""


class Head(NamedTuple):
    """The end of a file of lines; a checkpoint keeps it to recognise the file.

    Args:
        lines: The number of lines.
        hash: The hash of the last line.

    Example:
        >>> Head(lines=0, hash="").lines
        0
    """

    lines: int
    hash: str


class Contents(NamedTuple):
    """Verified lines, their head, and their size in bytes (the rest of the file is torn)."""

    lines: list[dict[str, Any]]
    head: Head
    size: int


def read_chain(
    path: str | os.PathLike[str],
    expect: Head | None = None,
    secret: bytes | None = None,
    witness: str | os.PathLike[str] | None = None,
) -> Contents:
    """Read and verify a file without locking or changing it. Raises `LedgerDamaged`."""
    path = Path(path)
    seen = read_head(Path(witness)) if witness is not None else None
    known = read_head(_head_path(path))  # read before the file, because a writer may append in between
    pieces = _contents(path).split(b"\n")
    lines: list[dict[str, Any]] = []
    hashes, size = [""], 0
    for number, piece in enumerate(pieces):
        whole = number < len(pieces) - 1
        if not (piece or whole):
            break
        line = _parsed(piece) if whole else None
        if line is None and number >= (known.lines if known else 0) and not any(pieces[number + 1 :]):
            break  # torn
        if line is None or not _verifies(hashes[-1], line, secret):
            raise LedgerDamaged(f"{path}: line {number + 1} is not what was written; do not spend from it")
        lines.append(line)
        hashes.append(line["hash"])
        size += len(piece) + 1
    if known is None and len(lines) > 1:
        raise LedgerDamaged(f"{_head_path(path)} is missing, so lines cut from {path.name} would go unnoticed")
    for name, mark in ((_head_path(path).name, known), ("the checkpoint", expect), (f"the witness {witness}", seen)):
        if mark is not None and (mark.lines > len(lines) or hashes[mark.lines] != mark.hash):
            raise LedgerDamaged(f"{path} was cut or rewritten: {name} knows of {mark.lines} lines, {len(lines)} verify")
    if witness is not None and len(lines) - (seen.lines if seen else 0) > 1:
        raise LedgerDamaged(
            f"the witness {witness} knows of {seen.lines if seen else 0} lines and {path} has {len(lines)}:"
            " the witness was restored or is new; if you are sure of the ledger,"
            f" copy {_head_path(path)} to the witness"
        )
    return Contents(lines, Head(len(lines), hashes[-1]), size)


class Chain:
    """A file that is open for appending, with an exclusive lock until `close`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        expect: Head | None = None,
        secret: bytes | None = None,
        witness: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path, self._secret = Path(path), secret
        self._witness = _outside(self.path, Path(witness)) if witness is not None else None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            _lock(self._file, self.path)
            self.lines, self.head, self._size = read_chain(self.path, expect, secret, self._witness)
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            if self.lines and read_head(_head_path(self.path)) != self.head:
                self._save_heads()  # a kill came before the head was written; lost lines would go undetected
            elif self.lines and self._witness is not None:
                _save_head(self._witness, self.head, True)  # a kill came before the witness was written
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise
        self._owner, self._usable = process_identity(), True

    def append(self, body: dict[str, Any]) -> None:
        """Add a line. After this returns, the line survives a crash of the process and of the machine.

        After an error the chain refuses further calls; open the file again to see what reached the disk.
        """
        self.refuse_other_processes()
        if not self._usable:
            raise UsageError(f"{self.path} is closed; open it again")
        self._usable = False
        self._refuse_replaced_file()
        digest = _hash(self.head.hash, body, self._secret)
        line = (_json({**body, "hash": digest}) + "\n").encode()
        try:
            _write(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # a full disk leaves half a line
            raise
        self._size += len(line)
        self.head = Head(self.head.lines + 1, digest)
        self._save_heads()
        self._usable = True

    @property
    def usable(self) -> bool:
        """Whether lines can be added: after a failed `append` or `close`, the file must be opened again."""
        return self._usable

    def _save_heads(self) -> None:
        first = self.head.lines == 1  # if a power cut restores an older head, it counts too few lines, never too many
        _save_head(_head_path(self.path), self.head, first)
        if self._witness is not None:
            _save_head(self._witness, self.head, True)

    def refuse_other_processes(self) -> None:
        """Raise `UsageError` in a process that only inherited the open file."""
        if process_identity() != self._owner:
            raise UsageError(
                f"{self.path} was opened by process {self._owner[1]} and this is process {os.getpid()}, a fork of it;"
                " only the process that opened a ledger may spend from it: open another ledger here"
            )

    def _refuse_replaced_file(self) -> None:
        mine = os.fstat(self._file)
        try:
            same = os.path.samestat(mine, self.path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise LedgerDamaged(
                f"{self.path} was deleted or replaced while it was in use; nothing more is spent from it"
            )

    def close(self) -> None:
        """Release the lock; in a forked child, only close the child's own file descriptor."""
        if self._file >= 0:
            if process_identity() == self._owner:
                _unlock(self._file)  # closing alone would leave the lock with a forked child
            os.close(self._file)
            self._file, self._usable = -1, False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A chain that nobody refers to any more would keep its lock and its file descriptor. When the interpreter ends,
        # `sys` may be None here, so the function is bound at the definition.
        if hasattr(self, "_file") and not is_finalizing():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"{self.path} cannot be copied or sent to another process: one process spends from a ledger")


def _head_path(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(previous: str, body: dict[str, Any], secret: bytes | None) -> str:
    content = (previous + _json(body)).encode()
    if secret is not None:
        return hmac.new(secret, content, hashlib.sha256).hexdigest()
    return hashlib.sha256(content).hexdigest()


def _parsed(piece: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(piece)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _verifies(previous: str, line: dict[str, Any], secret: bytes | None) -> bool:
    body = {name: value for name, value in line.items() if name != "hash"}
    try:
        return hmac.compare_digest(_hash(previous, body, secret), str(line.get("hash")))
    except (ValueError, TypeError, RecursionError):  # values that no ledger writes
        return False


def _outside(path: Path, witness: Path) -> Path:
    """The path of the witness, which must not be in the folder of the file or below it."""
    if witness.absolute().parent.resolve().is_relative_to(path.absolute().parent.resolve()):
        raise UsageError(
            f"the witness {witness} lies in the folder of {path.name} and would be restored with it; move it"
        )
    if not witness.absolute().parent.is_dir():
        raise UsageError(f"the folder of the witness {witness} does not exist; create it first")
    return witness


def read_head(path: Path) -> Head | None:
    """The head in a file, which is that of a chain or its witness; None if there is none. Raises `LedgerDamaged`."""
    try:
        known = json.loads(_contents(path))
        if known["lines"] < 0:
            raise ValueError(f"{known['lines']} lines")
        return Head(int(known["lines"]), str(known["hash"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LedgerDamaged(f"{path} cannot be read: {error}") from error


def _contents(path: Path) -> bytes:
    """The bytes of a file. Raises `FileNotFoundError`, or `LedgerDamaged` if the path is not a file."""
    try:
        return read_bytes(path)
    except UsageError as error:
        raise LedgerDamaged(str(error)) from None


def _save_head(path: Path, head: Head, durable: bool) -> None:
    """Replace the head at `path` atomically. Only a durable one survives a power cut for certain."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)  # left by a crash, with any mode
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        _write(file, (_json(head._asdict()) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)
    fresh.replace(path)
    if durable:
        flush(path.parent)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise UsageError("a ledger needs POSIX file locks (Linux, macOS)") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerInUse(f"{path} is in use by another process; wait for it or use another ledger") from error
