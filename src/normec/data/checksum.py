"""The SHA-256 of a data file's content, independent of its archive format."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import UsageError
from .entries import Entry

CHUNK = 1 << 20


def content_sha256(path: Path, text: bool = False) -> str:
    """Return the checksum of the unpacked bytes, of the raw array for .npy, or of the records for LIBSVM `text`.

    LIBSVM's copies differ in line ends, trailing blanks and a blank last line, none of which matters to what is read.
    So the checksum of a text is that of its records, each with its fields joined by one space and ended by a newline.
    """
    digest = hashlib.sha256()
    try:
        if path.suffix == ".npy":
            digest.update(np.ascontiguousarray(np.load(path, mmap_mode="r", allow_pickle=False)).data)
            return digest.hexdigest()
        with _open(path) as stream:
            if text:
                for line in stream:
                    if fields := line.split():
                        digest.update(b" ".join(fields) + b"\n")
            else:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
    except (EOFError, OSError, ValueError, zlib.error) as reason:
        raise UsageError(f"{path} is damaged or cut short ({reason}); remove it and get it again") from None
    return digest.hexdigest()


def verify(entry: Entry, files: dict[str, Path]) -> None:
    """Refuse a data set whose content differs from the published one."""
    for file, expected in entry.files.items():
        found = content_sha256(files[file], text=entry.family == "libsvm")
        if found != expected:
            raise UsageError(
                f"{files[file]} has sha256 {found[:12]}…, the published {entry.name} has {expected[:12]}…; "
                f"remove it and run `normec data get {entry.name}`"
            )


def _open(path: Path) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".bz2":
        return bz2.open(path)
    return path.open("rb")
