"""IDX files: what was written comes back; what is damaged is refused by name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from normec.data.idx import read_idx, read_pair
from normec.errors import UsageError

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(idx(IMAGES)) if suffix else idx(IMAGES))
    array = read_idx(path, 3)
    np.testing.assert_array_equal(array, IMAGES)
    assert array.flags.writeable, "torch.from_numpy wants an array of its own"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is 0 bytes long, its header alone has 16"),
        (idx(IMAGES)[:-1], r"is cut short: 39 bytes where its header \(2, 3, 4\) promises 40"),
        (idx(IMAGES) + b"\0", "has too much: 41 bytes"),
        (idx(IMAGES[0, 0]) + bytes(20), "starts with 0x00000801, an IDX file of 3 dimensions with 0x00000803"),
        (b"<!DOCTYPE html><html></html>", "starts with 0x3c21444f"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"train-images-idx3-ubyte {says}"):
        read_idx(path, 3)


def test_cut_or_false_gzip(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(IMAGES))[:-9])
    with pytest.raises(UsageError, match="is cut short: its gzip stream ends early"):
        read_idx(path, 3)
    path.write_bytes(idx(IMAGES))
    with pytest.raises(UsageError, match="cannot be read"):
        read_idx(path, 3)


def test_pairs_must_agree(tmp_path: Path) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx(IMAGES))
    labels.write_bytes(idx(np.array([3, 9], dtype=np.uint8)))
    pixels, targets = read_pair(images, labels, 10)
    assert pixels.shape == (2, 1, 3, 4)
    assert targets.tolist() == [3, 9]
    assert targets.dtype == np.int64
    with pytest.raises(UsageError, match="has label 9, the largest can be 8"):
        read_pair(images, labels, 9)
    labels.write_bytes(idx(np.array([3], dtype=np.uint8)))
    with pytest.raises(UsageError, match="has 1 labels for the 2 images"):
        read_pair(images, labels, 10)
