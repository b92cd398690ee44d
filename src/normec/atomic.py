"""Files that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomic(path: Path, write: Callable[[Path], None] | bytes | str, mode: int | None = None) -> None:
    """Give `path` its new contents in one step that a crash cannot split.

    `write` is the contents, or a function that writes them to the temporary file it is given. With `mode` the file has
    these permissions from the start, whatever the umask.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if mode is not None:
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
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


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
