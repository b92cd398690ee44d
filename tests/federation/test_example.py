"""The example of `normec federation local`: its patients, its settings, and settings that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normec
from normec.errors import UsageError
from normec.federation.local import heart_disease
from normec.federation.local.federation import Federation, LocalOptions


def federation(folder: Path, **config: Any) -> Federation:
    return Federation(LocalOptions(None, folder, None, config, data="heart-disease"))


def test_every_hospital_has_its_own_patients() -> None:
    found = normec.data.load("heart-disease")
    sizes = []
    for i in range(4):
        inputs = torch.stack([record[0] for record in heart_disease.data(i, 4)])  # type: ignore[attr-defined]
        assert found.groups is not None
        torch.testing.assert_close(inputs, found.train.tensors[0][found.groups == i])
        sizes.append(len(inputs))
    assert sizes == [199, 172, 30, 85]
    assert [len(one) for one in heart_disease.test()] == [104, 89, 16, 45]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="4 hospitals"):
        heart_disease.data(0, 3)


def test_the_example_is_a_secure_sum_at_patient_level(tmp_path: Path) -> None:
    settings = federation(tmp_path).settings
    run = settings.run
    assert settings.summed
    assert (settings.parties, settings.least, settings.colluding) == (4, 3, 1)
    assert (run.epsilon, run.delta, run.unit, run.trust, run.record_clip) == (1.0, 1e-4, "record", "secure-sum", "auto")
    assert (run.method, run.tau, run.alpha, run.weights) == ("dpsgd-clip", 1.0, None, "records")
    assert settings.records_of_parties == [199.0, 172.0, 30.0, 85.0]


def test_given_settings_win(tmp_path: Path) -> None:
    other = federation(tmp_path / "a", trust="local", epsilon=3.0).settings
    assert (other.summed, other.least, other.run.epsilon, other.run.method) == (False, 4, 3.0, "dpsgd-clip")
    normed = federation(tmp_path / "b", method="normec").settings.run
    assert (normed.alpha, normed.beta, normed.rounds) == (1.0, 0.3, 10)
    whole = federation(tmp_path / "e", unit="client", method="clip21").settings.run
    assert (whole.method, whole.alpha, whole.tau) == ("clip21", None, None)
    noise = federation(tmp_path / "c", sigma=2.0).settings.run
    assert (noise.sigma, noise.epsilon) == (2.0, None)
    masked = federation(tmp_path / "d", private=False, secure_sum=True, **dict.fromkeys(WITHOUT, "")).settings
    assert masked.summed
    assert not masked.run.private


WITHOUT = ("epsilon", "delta", "unit", "relation", "trust", "noise", "record_clip")


def test_what_the_example_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="epsilon must be > 0 and finite, got 0"):
        Federation(LocalOptions(None, tmp_path, None, {"epsilon": 0.0}, data="heart-disease"))
    with pytest.raises(UsageError, match="4 hospitals"):
        Federation(LocalOptions(None, tmp_path, 5, {}, data="heart-disease"))
    with pytest.raises(UsageError, match="forgets the secrets"):
        Federation(LocalOptions(None, tmp_path, None, {}, flower_nodes=True, data="heart-disease"))
