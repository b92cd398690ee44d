"""The party as a Flower app, whose errors are not told to the server."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from normec.federation.flower.records import from_records, to_records
from normec.federation.protocol.journal import read_journal

from .hostile import HostileServer, zeros

flower = pytest.importorskip("flwr.app")

SECRET = "patient 4711"


def answer(task: Any, folder: Path, policy: str) -> dict[str, Any]:
    """What comes back over Flower when a server asks a party with this task and this policy for a message."""
    from normec.federation.flower.app import client_app

    (folder / "policy.toml").write_text(policy)
    config = {"folder": str(folder), "policy": str(folder / "policy.toml")}
    context = flower.Context(1, 2, config, flower.RecordDict(), run_config={})
    asking = HostileServer(None, zeros(8))  # type: ignore[arg-type]  # the party is behind the app
    metadata = flower.Metadata(1, "message", 1, 2, "", "", time.time(), 3600.0, "train")
    message = flower.Message(content=to_records(asking.fields()), metadata=metadata)
    reply = client_app(task)(message, context)
    assert not reply.has_error()
    return from_records(reply.content)


def task(**parts: Any) -> Any:
    records = TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    given = {"model": lambda: nn.Linear(3, 2), "loss": nn.functional.cross_entropy, "data": lambda *_: records}
    return SimpleNamespace(**{**given, **parts})


def test_a_good_task_starts_a_handshake(tmp_path: Path) -> None:
    assert answer(task(), tmp_path, "epsilon = 8")["reason"] == "state"


def test_a_broken_policy_is_not_quoted_to_the_server(tmp_path: Path) -> None:
    found = answer(task(), tmp_path, f"epsilon = '{SECRET}'")
    assert found["reason"] == "failed"
    assert SECRET not in str(found)


def test_data_that_cannot_be_loaded_are_not_quoted_to_the_server(tmp_path: Path) -> None:
    def data(partition: int, partitions: int) -> Any:  # noqa: ARG001
        raise FileNotFoundError(SECRET)

    found = answer(task(data=data), tmp_path, "epsilon = 8")
    assert found["reason"] == "failed"
    assert SECRET not in str(found)
    assert SECRET in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
