"""The four hospitals: FLamby's patients, columns, test sets and scaling."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

from normec import UsageError
from normec.data import get, listing, load, split
from normec.data.heart_disease import CENTRES, FOLDER, INPUTS, PUBLIC_SCALING


def table(centre: str) -> np.ndarray:
    """The complete patients of a hospital: age … oldpeak without the columns that FLamby drops, and num."""
    with (FOLDER / f"{centre}.csv").open() as file:
        rows = [[value for at, value in enumerate(row) if at not in (10, 11, 12)] for row in csv.reader(file)][1:]
    return np.array([[float(value) for value in row] for row in rows if "?" not in row])


def by_hand() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs without scaling, targets, hospitals and test patients, written again from FLamby's description."""
    inputs, targets, owners, tested = [], [], [], []
    for number, centre in enumerate(CENTRES):
        rows = table(centre)
        disease = (rows[:, 10] > 0).astype(int)
        rare = min((disease == 0).sum(), (disease == 1).sum()) <= 2
        _, held = train_test_split(
            np.arange(len(rows)),
            test_size=1 - 0.66,
            train_size=0.66,
            random_state=43,
            stratify=None if rare else disease,
        )
        indicators = [rows[:, 2] == value for value in (2, 3, 4)] + [rows[:, 6] == value for value in (1, 2)]
        inputs.append(np.column_stack([rows[:, [0, 1, 3, 4, 5, 7, 8, 9]], *indicators]))
        targets.append(disease)
        owners.append(np.full(len(rows), number))
        tested.append(np.isin(np.arange(len(rows)), held))
    return np.concatenate(inputs), np.concatenate(targets), np.concatenate(owners), np.concatenate(tested)


def test_patients_columns_and_test_sets_are_those_of_flamby() -> None:
    inputs, targets, owners, test = by_hand()
    data = load("heart-disease")
    assert data.test is not None
    assert data.groups is not None
    assert data.test_groups is not None
    centre, scale = np.array([PUBLIC_SCALING[name] for name in INPUTS], dtype=float).T
    np.testing.assert_allclose(data.train.tensors[0].numpy() * scale + centre, inputs[~test], atol=1e-4)
    np.testing.assert_allclose(data.test.tensors[0].numpy() * scale + centre, inputs[test], atol=1e-4)
    assert data.train.tensors[1].tolist() == targets[~test].tolist()
    assert data.test.tensors[1].tolist() == targets[test].tolist()
    assert data.groups.tolist() == owners[~test].tolist()
    assert data.test_groups.tolist() == owners[test].tolist()
    assert torch.bincount(data.groups).tolist() == [199, 172, 30, 85]
    assert torch.bincount(data.test_groups).tolist() == [104, 89, 16, 45]
    assert not data.fitted


def test_scaling_by_centre_is_that_of_flamby() -> None:
    inputs, _, owners, test = by_hand()
    data = load("heart-disease", scaling="centre")
    assert data.test is not None
    assert data.fitted
    expected = torch.from_numpy(inputs.astype(np.float32))
    for owner in range(4):
        own = torch.from_numpy(owners == owner)
        known = expected[own & torch.from_numpy(~test)]
        expected[own] = (expected[own] - known.mean(0)) / (known.std(0) + 1e-9)
    torch.testing.assert_close(data.train.tensors[0], expected[~test], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(data.test.tensors[0], expected[test], rtol=1e-3, atol=1e-4)


def test_the_hospitals_are_the_clients_of_the_split_by_centre() -> None:
    data = load("heart-disease")
    parts = split(data.train.tensors[1], None, "centre", groups=data.groups)
    assert [len(part) for part in parts] == [199, 172, 30, 85]
    pooled = split(data.train.tensors[1], 9, "iid")
    assert [len(part) for part in pooled] == [54] * 9
    with pytest.raises(UsageError, match="needs groups"):
        split(data.train.tensors[1], None, "centre")


def test_only_this_data_set_has_a_choice_of_scalings(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1 1:1\n2 1:2\n")
    for name in ("digits", f"libsvm:{tmp_path / 'mine'}"):
        with pytest.raises(UsageError, match="scaling is a choice of heart-disease"):
            load(name, scaling="centre")
    with pytest.raises(UsageError, match="unknown scaling"):
        load("heart-disease", scaling="by-magic")  # type: ignore[arg-type]


def test_it_is_listed_and_needs_no_download() -> None:
    row = next(one for one in listing() if one.name == "heart-disease")
    assert (row.present, row.licence, row.size) == (True, "CC BY 4.0", "486 + 254 × 13")
    assert get("heart-disease") is None


def test_the_files_are_part_of_the_wheel_with_their_licence() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["normec"]
    packed = {file for pattern in patterns for file in (root / "src" / "normec").glob(pattern)}
    names = [f"{centre}.csv" for centre in CENTRES] + ["LICENSE.txt", "test-rows.json"]
    assert {FOLDER / name for name in names} <= packed
    licence = (FOLDER / "LICENSE.txt").read_text()
    assert "CC BY 4.0" in licence
    assert "Janosi" in licence
