"""Files on disk: written whole or not at all, and errors of the disk said in one line that names the path."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import Unwritable, UsageError

OWNER_ONLY = 0o600  # the mode of files that hold what clients keep to themselves


def write_atomic(path: Path, write: Callable[[Path], None] | bytes | str, mode: int | None = None) -> None:
    """Give `path` its new contents in one step that a crash cannot split.

    Args:
        path: The file to create or replace.
        write: The contents, or a function that writes them to the temporary file it is given.
        mode: The file's permissions, whatever the umask; None leaves them to the umask.

    Raises:
        Unwritable: The disk is full, or the folder does not take files.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            if isinstance(write, str):
                aside.write_bytes(write.encode())
            elif isinstance(write, bytes):
                aside.write_bytes(write)
            else:
                write(aside)
            if mode is not None:
                aside.chmod(mode)
            flush(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        flush(path.parent)


def append(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Add to the end of a file; `mode` (less the umask) is that of a file that is created by it."""
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "ab") as file:
            file.write(data)


def read_file(path: Path) -> bytes | None:
    """A file's contents, None where there is no file; what is there and cannot be read is a `UsageError`."""
    file = open_file(path)
    if file is None:
        return None
    with file:
        return file.read()


def open_file(path: Path) -> IO[bytes] | None:
    """As `read_file`, for files that are not read at once."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot read {path}: it is not a file; move it away")
        return path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; make it readable, or choose another folder") from None


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that names `path`, the reason and the cure."""
    try:
        yield
    except Unwritable:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cure = "make room" if full else "make it writable or choose another folder"
        raise Unwritable(f"cannot write {path}: {error.strerror or error}; {cure}, and run it again") from None
