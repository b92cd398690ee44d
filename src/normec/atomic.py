"""Files that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PRIVATE_FILE = 0o600  # the mode of a file that only its owner may read


def write_atomic(path: Path, write: Callable[[Path], None] | bytes | str, *, private: bool = False) -> None:
    """Give `path` its new contents in one step that a crash cannot split.

    Args:
        path: The file to replace.
        write: The contents, or a function that writes them to the temporary file it is given.
        private: Whether only the owner may read the file, whatever the umask is.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if private:
            aside.unlink(missing_ok=True)
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
        if isinstance(write, str):
            aside.write_text(write, encoding="utf-8")
        elif isinstance(write, bytes):
            aside.write_bytes(write)
        else:
            write(aside)
        flush(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)


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
