"""Read files that somebody else may have written, damaged or exchanged: each gives its contents or one line of error.

A pipe, a device or a folder in place of a file is refused at once, so that nothing waits for it.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import IO, Any

from ..errors import UsageError


def open_file(path: Path) -> IO[bytes]:
    """A regular file, open for reading.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        UsageError: There is something that cannot be read; the message names the path and the reason.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for a pipe's writer
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UsageError(f"{path} cannot be read: it is not a regular file")
    return os.fdopen(opened, "rb")


def read_bytes(path: Path, limit: int | None = None, tail: int | None = None) -> bytes:
    """The contents of a file of at most `limit` bytes; with `tail` only its last so many.

    Raises as `open_file` does.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise UsageError(f"{path} has {size:,} bytes; at most {limit:,} are read")
        try:
            file.seek(max(0, size - tail) if tail is not None else 0)
            return file.read()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read_if_present(path: Path, limit: int | None = None) -> bytes | None:
    """The contents of a file, None where there is nothing at `path`; raises `UsageError` as `open_file` does."""
    try:
        return read_bytes(path, limit)
    except FileNotFoundError:
        return None


def read_text(path: Path, limit: int | None = None) -> str:
    """The contents of a file in UTF-8; raises as `read_bytes` does."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is damaged: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: Path, limit: int | None = None) -> Any:
    """The value in a JSON file; raises as `read_bytes` does."""
    return parse_json(read_text(path, limit), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text that comes from `where`; raises `UsageError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{where} is damaged: {error}") from None


def read_toml(path: Path, limit: int | None = None) -> dict[str, Any]:
    """The tables of a TOML file; raises as `read_bytes` does."""
    return parse_toml(read_text(path, limit), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text that comes from `where`; raises `UsageError`."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{where} cannot be read as TOML: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{where} cannot be read as TOML: {error}") from None
