"""Files on disk: written whole or not at all, and errors of the disk said in one line that names the path."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Unwritable

PRIVATE_FILE = 0o600  # the mode of a file that only its owner may read


def write_atomic(path: Path, write: Callable[[Path], None] | bytes | str, *, private: bool = False) -> None:
    """Give `path` its new contents in one step that a crash cannot split.

    Args:
        path: The file to create or replace.
        write: The contents, or a function that writes them to the temporary file it is given.
        private: Whether only the owner may read the file, whatever the umask is.

    Raises:
        Unwritable: The disk is full, or the folder does not take files.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            if private:
                aside.unlink(missing_ok=True)
                os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
            if isinstance(write, str):
                aside.write_bytes(write.encode())
            elif isinstance(write, bytes):
                aside.write_bytes(write)
            else:
                write(aside)
            flush(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        flush(path.parent)


def append(path: Path, data: bytes, *, private: bool = False) -> None:
    """Add to the end of a file; a `private` one is created for its owner alone."""
    with writing(path):
        mode = PRIVATE_FILE if private else 0o666
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "ab") as file:
            file.write(data)


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, for the owner alone whatever the umask is."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


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
