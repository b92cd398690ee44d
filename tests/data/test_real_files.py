"""The published files themselves, where this machine has them; elsewhere these tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from normec.data import get, load
from normec.data.checksum import verify
from normec.data.entries import ENTRIES
from normec.data.folders import locate

GIVEN = os.environ.get("NORMEC_DATA")
FOLDER = Path(GIVEN) if GIVEN else Path(__file__).parents[3] / "shared" / "data"


def present(name: str) -> None:
    if locate(ENTRIES[name], FOLDER) is None:
        pytest.skip(f"{name} is neither in {FOLDER} (NORMEC_DATA) nor in the cache")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("name", "features", "train", "test"),
    [
        ("a9a", 123, [24_720, 7_841], [12_435, 3_846]),
        ("w8a", 300, [38_616, 1_183], [9_654, 296]),
        ("phishing", 68, [3_918, 4_926], [980, 1_231]),
        ("mushrooms", 112, [3_133, 3_366], [783, 842]),
    ],
)
def test_libsvm(name: str, features: int, train: list[int], test: list[int]) -> None:
    present(name)
    dataset = load(name, FOLDER)
    assert dataset.test is not None
    assert dataset.shape == (features,)
    for part, counts in ((dataset.train, train), (dataset.test, test)):
        inputs, targets = part.tensors
        assert inputs.shape == (sum(counts), features)
        assert inputs.dtype == torch.float32
        assert torch.bincount(targets).tolist() == counts


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["a9a", "w8a", "phishing", "mushrooms", "mnist", "fashion-mnist", "cifar10"])
def test_checksums(name: str) -> None:
    present(name)
    lines: list[str] = []
    files = locate(ENTRIES[name], FOLDER)
    assert files is not None
    verify(ENTRIES[name], files)
    assert get(name, FOLDER, lines.append) == next(iter(files.values())).parent
    assert "checksums agree" in lines[-1]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_images(name: str) -> None:
    present(name)
    dataset = load(name, FOLDER)
    assert dataset.test is not None
    assert dataset.transform is not None
    images, targets = dataset.train.tensors
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert tuple(images.shape) == (ENTRIES[name].rows, *dataset.shape)
    assert len(dataset.test) == 10_000
    assert len(targets.unique()) == 10
    batch = dataset.transform(images[:2_000])
    assert batch.dtype == torch.float32
    assert batch.mean().abs() < 0.2
    assert (batch.std() - 1).abs() < 0.2
    if name == "cifar10":
        assert dataset.augment is not None
        assert dataset.augment(images[:8], torch.rand(8, dataset.augment.draws)).shape == (8, 3, 32, 32)
