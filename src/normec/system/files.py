"""Files that are written completely or not at all, and read completely or refused with one line.

A disk error becomes one line that names the path, the reason and the cure. Files that are read may have been written,
damaged or replaced by somebody else; a pipe, a device or a folder instead of a file is refused at once, so that nothing
waits for it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import Unwritable, UsageError

PRIVATE_FILE = 0o600  # the mode of a file that only its owner may read


def write_atomic(
    path: Path, write: Callable[[Path], None] | bytes | memoryview | str, *, private: bool = False
) -> None:
    """Replace the contents of `path` in one step, so that a crash leaves the old or the new contents.

    Args:
        path: The file to create or replace.
        write: The contents, or a function that writes them to the temporary file it is given.
        private: Whether only the owner can read the file, whatever the umask is.

    Raises:
        Unwritable: The disk is full, or the folder is not writable.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            if private:
                aside.unlink(missing_ok=True)
                os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
            if isinstance(write, str):
                aside.write_bytes(write.encode())
            elif isinstance(write, bytes | memoryview):
                aside.write_bytes(write)
            else:
                write(aside)
            flush(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        flush(path.parent)


def append(path: Path, data: bytes, *, private: bool = False) -> None:
    """Append to a file; a `private` file is created readable for its owner only."""
    with writing(path):
        mode = PRIVATE_FILE if private else 0o666
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "ab") as file:
            file.write(data)


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible for the owner only, whatever the umask is."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def flush(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk error into one line that names `path`, the reason and the cure."""
    try:
        yield
    except Unwritable:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cure = "free some space" if full else "make it writable or choose another folder"
        raise Unwritable(f"cannot write {path}: {error.strerror or error}; {cure}, and run it again") from None


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        UsageError: It cannot be read; the message names the path and the reason.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a pipe
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UsageError(f"{path} cannot be read: it is not a regular file")
    return os.fdopen(opened, "rb")


def read_bytes(path: Path, limit: int | None = None, tail: int | None = None) -> bytes:
    """Return the contents of a file of at most `limit` bytes; with `tail`, only its last `tail` bytes.

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
    """Return the contents of a file, or None if it does not exist; raises `UsageError` as `open_file` does."""
    try:
        return read_bytes(path, limit)
    except FileNotFoundError:
        return None


def read_text(path: Path, limit: int | None = None) -> str:
    """Return the contents of a UTF-8 file; raises as `read_bytes` does."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is damaged: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: Path, limit: int | None = None) -> Any:
    """Return the value in a JSON file; raises as `read_bytes` does."""
    return parse_json(read_text(path, limit), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text that comes from `where`; raises `UsageError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{where} is damaged: {error}") from None


def read_toml(path: Path, limit: int | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file; raises as `read_bytes` does."""
    return parse_toml(read_text(path, limit), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text that comes from `where`; raises `UsageError`."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{where} cannot be read as TOML: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{where} cannot be read as TOML: {error}") from None


@contextmanager
def unpacked(source: Path) -> Iterator[Path]:
    """Yield the folder itself, or a temporary folder with the contents of an archive."""
    if source.is_dir():
        yield source
        return
    if not source.exists():
        raise UsageError(f"there is no {source}; give a folder, or an archive of one (.tgz)")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")  # nothing outside of the folder, and no devices or pipes
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            why = str(error).partition(":\n")[0]  # without what each format has to say
            raise UsageError(f"{source} cannot be unpacked: {why}; give an archive of the folder (.tgz)") from None
        yield Path(folder)


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table of plain values as TOML, for code that must not depend on a library for it.

    Inner tables are written inline. JSON's strings and numbers are valid TOML, except NaN and infinities.
    """
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in table.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
