"""Clients whose records are fetched are known by a record each: a run does not go on with others in their places."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from normec import NormEC, Privacy, Problem, Run, Storage, UsageError, train
from normec.models import Softmax

from ...support.runs import InterruptAt

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
}


class Lazy(Dataset[Any]):
    """Six records of one client, made when asked for."""

    def __init__(self, client: int, draw: str = "nothing") -> None:
        self._client, self._draw = client, DRAWS[draw]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, record: int) -> tuple[Tensor, int]:
        return torch.eye(4)[self._client] + 1e-3 * self._draw(), record % 3


def go_on(out: Path, order: Sequence[int], draw: str = "nothing", stop: int = -1) -> Run:
    problem = Problem(Softmax(4, 3), F.cross_entropy, [Lazy(client, draw) for client in order])
    privacy = Privacy(epsilon=1.0, trust="secure-sum")
    options: dict[str, Any] = {
        "out": out,
        "storage": Storage(checkpoint_seconds=0.0),
        "callbacks": [InterruptAt(stop)],
        "seed": 0,
    }
    return train(problem, NormEC(0.1, 0.4), lr=0.1, rounds=8, privacy=privacy, **options)


def test_clients_in_another_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go_on(tmp_path / "run", (0, 1, 2), stop=4)
    with pytest.raises(UsageError, match="data"):
        go_on(tmp_path / "run", (1, 2, 0))
    assert go_on(tmp_path / "run", (0, 1, 2)).finished


@pytest.mark.parametrize("draw", ["torch", "random", "numpy"])
def test_records_that_are_drawn_at_random_are_known_again(draw: str) -> None:
    clients = [Lazy(client, draw) for client in range(3)]
    held = Problem(Softmax(4, 3), F.cross_entropy, clients).records
    first = held.digest()
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    assert held.digest() == first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index, arg-type]
    assert Problem(Softmax(4, 3), F.cross_entropy, clients[::-1]).records.digest() != first
