"""A file of lines that only grows, one process at a time, and notices when it was changed.

On disk. `NAME` holds one JSON object a line, each with `hash` = SHA-256(hash of the line before + the rest of the
line); `NAME.head` holds the number of lines and the last hash, replaced atomically after each append. `append`
returns when both are on the disk.

What is noticed when the file is opened:
| | |
| --- | --- |
| a line changed, removed in the middle, or exchanged | yes, the hashes break |
| lines cut from the end | yes, `NAME.head` (or the caller's `expect`) knows more lines |
| `NAME` deleted, `NAME.head` kept | yes |
| `NAME.head` deleted, releases present | yes, it must be there |
| everything rewritten consistently, or rolled back together | only with `expect` (a checkpoint's `Head`) |
| everything rewritten by someone who may rewrite the checkpoint too | only with `secret` (HMAC instead of a hash) |

A torn line, the work of a crash during `append`, is the last of the file, is no whole JSON, and is not counted by
`NAME.head`. Since `append` had not returned, nothing that waited for it has happened, and the line is dropped. A
whole line that `NAME.head` does not count yet is kept, and the head is brought up to date on opening.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from normec.errors import UsageError


class LedgerDamaged(RuntimeError):  # noqa: N818  (a state of the file, not of the program)
    """The file is not what was written: changed, cut, or rolled back."""


class LedgerInUse(RuntimeError):  # noqa: N818
    """Another process holds the file."""


class Head(NamedTuple):
    """How many lines there are and the hash of the last: what a checkpoint keeps to recognise the file."""

    lines: int
    hash: str


class Contents(NamedTuple):
    """Verified lines, their head, and how many bytes of the file they fill (the rest is torn)."""

    lines: list[dict[str, Any]]
    head: Head
    size: int


def read_chain(path: str | os.PathLike[str], expect: Head | None = None, secret: bytes | None = None) -> Contents:
    """Read and verify without a lock and without changing anything; raises `LedgerDamaged`."""
    path = Path(path)
    known = _read_head(path)  # before the file itself: a writer may append in between, never the other way round
    pieces = path.read_bytes().split(b"\n")
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
        raise LedgerDamaged(f"{_side(path)} is missing, so lines cut from {path.name} would go unnoticed")
    for name, mark in ((_side(path).name, known), ("the checkpoint", expect)):
        if mark is not None and (mark.lines > len(lines) or hashes[mark.lines] != mark.hash):
            raise LedgerDamaged(f"{path} was cut or rewritten: {name} knows of {mark.lines} lines, {len(lines)} verify")
    return Contents(lines, Head(len(lines), hashes[-1]), size)


class Chain:
    """The file, open for appending; holds an exclusive lock until `close`."""

    def __init__(self, path: str | os.PathLike[str], expect: Head | None = None, secret: bytes | None = None) -> None:
        self.path, self._secret = Path(path), secret
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._file, self.path)
            self.lines, self.head, self._size = read_chain(self.path, expect, secret)
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            if self.lines and _read_head(self.path) != self.head:
                _save_head(self.path, self.head)  # killed before its head was written: a line cut now would be missed
        except BaseException:
            os.close(self._file)
            raise
        self._usable = True

    def append(self, body: dict[str, Any]) -> None:
        """Add a line; on return it survives a crash of the process and of the machine.

        After an error the chain refuses to go on: open the file anew to see what reached the disk.
        """
        if not self._usable:
            raise UsageError(f"{self.path} is closed; open it again")
        self._usable = False
        digest = _hash(self.head.hash, body, self._secret)
        line = (_plain({**body, "hash": digest}) + "\n").encode()
        try:
            _write(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # a full disk leaves half a line
            raise
        self._size += len(line)
        self.head = Head(self.head.lines + 1, digest)
        _save_head(self.path, self.head)
        self._usable = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # gives the lock back
            self._file, self._usable = -1, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _side(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _plain(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(previous: str, body: dict[str, Any], secret: bytes | None) -> str:
    content = (previous + _plain(body)).encode()
    if secret is not None:
        return hmac.new(secret, content, hashlib.sha256).hexdigest()
    return hashlib.sha256(content).hexdigest()


def _parsed(piece: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(piece)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _verifies(previous: str, line: dict[str, Any], secret: bytes | None) -> bool:
    body = {name: value for name, value in line.items() if name != "hash"}
    return hmac.compare_digest(_hash(previous, body, secret), str(line.get("hash")))


def _read_head(path: Path) -> Head | None:
    try:
        known = json.loads(_side(path).read_bytes())
        return Head(int(known["lines"]), str(known["hash"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerDamaged(f"{_side(path)} cannot be read: {error}") from error


def _save_head(path: Path, head: Head) -> None:
    fresh = _side(path).with_suffix(".new")
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write(file, (_plain(head._asdict()) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)
    fresh.replace(_side(path))
    if head.lines > 1:
        return  # should a power cut bring back an older head, it still counts no line too many
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise UsageError("a ledger needs POSIX file locks (Linux, macOS)") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerInUse(f"{path} is in use by another process; wait for it or use another ledger") from error
