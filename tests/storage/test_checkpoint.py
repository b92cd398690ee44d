"""Checkpoints and the folder of a run: the newest checkpoint counts, and half-written ones are removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normec import UsageError
from normec.storage.checkpoint import Checkpoints
from normec.storage.run_folder import RunStorage

from ..support.runs import snapshot

IDENTITY: dict[str, Any] = {"method": "gd", "lr": 0.1, "shape": (2, 3)}


def tensors(value: float) -> dict[str, Tensor]:
    return {
        "x": torch.full((3,), value, dtype=torch.float64),
        "memory": torch.full((2, 3), value).expand(2, 3),
        "half": torch.full((2,), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "strided": torch.arange(6.0).view(2, 3).T,
    }


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "c", IDENTITY).save(7, tensors(2.5), {"messages": 4})
    found = Checkpoints(tmp_path / "c", IDENTITY).load()
    assert found is not None
    held, facts = found
    assert held.keys() == tensors(2.5).keys()
    for name, tensor in tensors(2.5).items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor), name
    assert (facts["round"], facts["messages"]) == (7, 4)


def test_no_checkpoint_is_none_and_makes_no_folder(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "c", IDENTITY).load() is None
    assert list(tmp_path.iterdir()) == []


def test_the_newest_replaces_the_older_and_what_a_kill_left(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c", IDENTITY)
    store.save(1, tensors(1), {})
    (tmp_path / "c/.round-00000002.safetensors.77.part").write_bytes(b"half")
    (tmp_path / "c/round-00000002.safetensors").write_bytes(b"whole, but never made the latest")
    found = store.load()
    assert found is not None
    assert found[1]["round"] == 1  # latest.json alone says which one counts
    store.save(3, tensors(3), {})
    assert set(snapshot(tmp_path / "c")) == {"latest.json", "round-00000003.safetensors"}


def test_saving_the_same_round_again_is_harmless(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c", IDENTITY)
    store.save(1, tensors(1), {})
    store.save(1, tensors(1), {})
    found = store.load()
    assert found is not None
    assert torch.equal(found[0]["x"], tensors(1)["x"])


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (IDENTITY | {"lr": 0.2}, "lr is 0.1 there, 0.2 here"),
        (IDENTITY | {"more": 1}, "more is None there, 1 here"),
        ({"method": "gd", "lr": 0.1}, r"shape is \[2, 3\] there, None here"),
    ],
)
def test_another_identity_is_refused_and_the_difference_named(tmp_path: Path, other: dict[str, Any], key: str) -> None:
    Checkpoints(tmp_path / "c", IDENTITY).save(1, tensors(1), {})
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=key):
        Checkpoints(tmp_path / "c", other).load()
    assert snapshot(tmp_path) == before


def test_storage_without_a_folder_keeps_rows_in_memory() -> None:
    storage = RunStorage(None, IDENTITY)
    assert storage.load() is None
    storage.open()
    storage.history.append({"round": 0, "loss": 1.0})
    storage.save(0, tensors(0), {})
    storage.close()
    assert storage.history["loss"] == [1.0]


def test_rows_that_no_checkpoint_has_seen_are_cut_off(tmp_path: Path) -> None:
    storage = RunStorage(tmp_path / "run", IDENTITY)
    assert storage.load() is None
    assert list(tmp_path.iterdir()) == []  # nothing until it is opened
    storage.open()
    storage.history.append({"round": 0})
    storage.save(1, tensors(1), {"note": "kept"})
    storage.history.append({"round": 1})
    storage.close()
    again = RunStorage(tmp_path / "run", IDENTITY)
    found = again.load()
    assert found is not None
    assert found[1]["note"] == "kept"
    assert again.history.rows == [{"round": 0}]
    assert (tmp_path / "run/metrics.jsonl").read_text() == json.dumps({"round": 0}) + "\n"
    again.close()


def test_a_run_that_has_begun_is_known_before_its_first_checkpoint(tmp_path: Path) -> None:
    storage = RunStorage(tmp_path / "run", IDENTITY)
    storage.begin()
    storage.close()
    again = RunStorage(tmp_path / "run", IDENTITY)
    assert again.load() is None
    again.close()
    with pytest.raises(UsageError, match="another configuration"):
        RunStorage(tmp_path / "run", IDENTITY | {"lr": 0.2}).load()


@pytest.mark.parametrize("left", ["metrics.jsonl", "ledger.jsonl", "checkpoint/round-00000007.safetensors"])
def test_what_is_left_of_a_run_without_its_latest_checkpoint_is_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run" / left).write_text("{}\n{}\n")
    storage = RunStorage(tmp_path / "run", IDENTITY)
    with pytest.raises(UsageError, match=f"latest.json is missing beside {left.rpartition('/')[2]}"):
        storage.load()
    storage.close()
    assert (tmp_path / "run" / left).read_text() == "{}\n{}\n"


def test_one_storage_at_a_time(tmp_path: Path) -> None:
    first, second = RunStorage(tmp_path / "run", IDENTITY), RunStorage(tmp_path / "run", IDENTITY)
    first.open()
    with pytest.raises(UsageError, match="another process writes to"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_user_s_own_copy_beside_the_checkpoint_stays(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c", IDENTITY)
    store.save(1, tensors(1), {})
    (tmp_path / "c/best-so-far.safetensors").write_bytes((tmp_path / "c/round-00000001.safetensors").read_bytes())
    store.save(2, tensors(2), {})
    assert (tmp_path / "c/best-so-far.safetensors").exists()
