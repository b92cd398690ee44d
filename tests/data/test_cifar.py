"""CIFAR-10 decoding on small archives written here in the two published formats."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from normec.data.cifar import (
    ARCHIVE,
    TEST_BATCHES,
    TRAIN_BATCHES,
    decode_archive,
    decode_batch,
    decode_strips,
    read_arrays,
)
from normec.errors import UsageError

COUNT = 4  # images a batch


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        name: (
            random.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8),
            random.integers(0, 10, COUNT, dtype=np.uint8),
        )
        for name in (*TRAIN_BATCHES, *TEST_BATCHES)
    }


def binary(images: np.ndarray, labels: np.ndarray) -> bytes:
    """The official layout, a record at a time: label, red plane, green plane, blue plane."""
    return b"".join(
        bytes([label]) + b"".join(image[:, :, channel].tobytes() for channel in range(3))
        for image, label in zip(images, labels, strict=True)
    )


def write_archive(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def check(out: Path, data: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for part, names in (("train", TRAIN_BATCHES), ("test", TEST_BATCHES)):
        images, labels = read_arrays(out / f"{part}_x.npy", out / f"{part}_y.npy")
        assert images.flags.c_contiguous
        assert images.dtype == np.uint8
        np.testing.assert_array_equal(images, np.concatenate([data[n][0] for n in names]).transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(labels, np.concatenate([data[n][1] for n in names]))


def test_official_archive(tmp_path: Path) -> None:
    data = batches()
    archive = write_archive(tmp_path / ARCHIVE, {name: binary(*pair) for name, pair in data.items()})
    decode_archive(archive, tmp_path)
    check(tmp_path, data)


def test_png_strips(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    data = batches()
    for name, (pixels, _) in data.items():
        image.fromarray(pixels.reshape(COUNT, 1024, 3)).save(tmp_path / f"{name}.png")
    for part, names in (("train", TRAIN_BATCHES), ("test", TEST_BATCHES)):
        labels = np.concatenate([data[name][1] for name in names]).tolist()
        (tmp_path / f"{part}_lables.json").write_text(json.dumps(labels))
    decode_strips(tmp_path, tmp_path)
    check(tmp_path, data)
    (tmp_path / "data_batch_3.png").write_bytes((tmp_path / "data_batch_3.png").read_bytes()[:500])
    with pytest.raises(UsageError, match="cannot be decoded"):
        decode_strips(tmp_path, tmp_path)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    contents = {name: binary(*pair) for name, pair in batches().items()}
    whole = write_archive(tmp_path / ARCHIVE, contents).read_bytes()
    (tmp_path / ARCHIVE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="damaged or cut short"):
        decode_archive(tmp_path / ARCHIVE, tmp_path)
    del contents["data_batch_4"]
    with pytest.raises(UsageError, match=r"has no data_batch_4\.bin"):
        decode_archive(write_archive(tmp_path / ARCHIVE, contents), tmp_path)
    with pytest.raises(UsageError, match="whole records of 3073 bytes, got 3072"):
        decode_batch(bytes(3072), "test_batch.bin")


def test_wrong_arrays_in_the_cache_are_named(tmp_path: Path) -> None:
    images, labels = tmp_path / "train_x.npy", tmp_path / "train_y.npy"
    np.save(images, np.zeros((2, 32, 32, 3), dtype=np.uint8))
    np.save(labels, np.zeros(3, dtype=np.uint8))
    with pytest.raises(UsageError, match=r"got \[2, 32, 32, 3\] and \[3\]"):
        read_arrays(images, labels)
    np.save(labels, np.array([1, 10], dtype=np.uint8))
    with pytest.raises(UsageError, match="label 10, the largest can be 9"):
        read_arrays(images, labels)
    np.save(labels, np.zeros(2))
    with pytest.raises(UsageError, match="must be a uint8 array"):
        read_arrays(images, labels)
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"not a complete \.npy file"):
        read_arrays(images, labels)
    np.save(images, np.array([{"code": "would run"}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"not a complete \.npy file"):
        read_arrays(images, labels)
