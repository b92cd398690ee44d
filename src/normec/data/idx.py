"""The IDX files of MNIST and Fashion-MNIST, plain or gzipped.

A file begins with four bytes (0, 0, type, number of dimensions) and one big-endian 32-bit length per dimension; the
values follow. Type 8 is the unsigned byte, the only type that these data sets use.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array in a file; raises `UsageError` unless header and length agree exactly."""
    content = _content(path)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise _damaged(path, f"is {len(content)} bytes long, its header alone has {header}")
    magic = struct.unpack(">I", content[:4])[0]
    expected = UNSIGNED_BYTE << 8 | dimensions
    if magic != expected:
        raise _damaged(path, f"starts with 0x{magic:08x}, an IDX file of {dimensions} dimensions with 0x{expected:08x}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    length = header + math.prod(shape)
    if len(content) != length:
        kind = "is cut short" if len(content) < length else "has too much"
        raise _damaged(path, f"{kind}: {len(content)} bytes where its header {shape} promises {length}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


def read_pair(images: Path, labels: Path, classes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, 1, H, W] with their class indices."""
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise _damaged(labels, f"has {len(targets)} labels for the {len(pixels)} images of {images.name}")
    if len(targets) and targets.max() >= classes:
        raise _damaged(labels, f"has label {targets.max()}, the largest can be {classes - 1}")
    return pixels[:, None], targets.astype(np.int64)


def _content(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return stream.read()
        return path.read_bytes()
    except EOFError:
        raise _damaged(path, "is cut short: its gzip stream ends early") from None
    except (OSError, zlib.error) as reason:
        raise _damaged(path, f"cannot be read: {reason}") from None


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} {what}; remove it and get it again")
