"""A federation computes what the one-process engine computes: same seed, same x, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normec import (
    DPSGD,
    EF21,
    EF21SGDM,
    GD,
    Clip,
    Clip21,
    Clip21SGD2M,
    Compute,
    FixedSize,
    LocalSteps,
    Logging,
    Method,
    MomentumNormEC,
    NormEC,
    RandK,
    SmoothedNorm,
    TopK,
    UsageError,
    train,
)

from .in_process import NODES, InProcessFederation, convolution, plan, softmax, whole

METHODS: dict[str, Method] = {
    "normec": NormEC(alpha=0.01, beta=0.1),
    "normec, no server norm, forgetting": NormEC(alpha=0.1, beta=0.3, server_norm=False, decay=0.1),
    "clip21": Clip21(0.2),
    "ef21 topk": EF21(TopK(30)),
    "ef21 randk": EF21(RandK(30)),
    "dpsgd norm": DPSGD(SmoothedNorm(0.1)),
    "dpsgd clip": DPSGD(Clip(0.2)),
    "dpsgd with momentum": DPSGD(Clip(0.2), momentum=0.8),
    "gd": GD(),
    "normec-momentum": MomentumNormEC(0.1, 0.3, client_momentum=0.6),
    "clip21-sgd2m": Clip21SGD2M(0.2, 0.5, client_momentum=0.6),
    "ef21-sgdm": EF21SGDM(TopK(30), client_momentum=0.6),
}


def compared(folder: Path, method: Method, model: Callable[[], nn.Module], **how: Any) -> None:
    rounds = how.pop("rounds", 5)
    relative = torch.tensor(how["weights"], dtype=torch.float64) * len(NODES) if "weights" in how else None
    federation = InProcessFederation(folder, method, plan(rounds, **how | {"weights": relative}), model=model)
    x = federation.run()
    reference = train(
        whole(model),
        method,
        lr=0.5,
        rounds=rounds,
        seed=7,
        compute=Compute(dtype=torch.float64, engine="loop"),
        logging=Logging(every=1),
        **how,
    )
    torch.testing.assert_close(x, reference.x, rtol=1e-9, atol=1e-12)
    history = federation.server.storage.history
    assert [row["round"] for row in history] == [row["round"] for row in reference.history]
    torch.testing.assert_close(history["loss"], reference.history["loss"][: len(history["loss"])], rtol=1e-6, atol=1e-9)
    assert history["messages"] == reference.history["messages"]
    assert history["bytes"] == reference.history["bytes"]
    state = federation.server.state.run
    assert state.clients.keys() == reference.state.clients.keys() & {"memory"}, "averages stay with the parties"
    if state.clients:
        torch.testing.assert_close(state.memory, reference.state.memory, rtol=1e-9, atol=1e-12)
        mean = state.memory.mean(0) if relative is None else relative @ state.memory / len(NODES)
        torch.testing.assert_close(state.estimate, mean, rtol=1e-9, atol=1e-12)
    federation.server.close()


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", METHODS)
def test_logistic_regression(name: str, tmp_path: Path) -> None:
    compared(tmp_path, METHODS[name], softmax)


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", ["normec", "ef21 topk", "dpsgd clip"])
def test_weighted_parties(name: str, tmp_path: Path) -> None:
    compared(tmp_path, METHODS[name], softmax, weights=(0.4, 0.3, 0.15, 0.1, 0.05))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normec", "clip21", "ef21 topk"])
def test_a_small_cnn_on_batches(name: str, tmp_path: Path) -> None:
    compared(tmp_path, METHODS[name], convolution, batch_size=8, rounds=7)


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("normec", LocalSteps(steps=3, lr=0.1)),
        ("dpsgd clip", LocalSteps(steps=3, lr=0.1, momentum=0.5, prox=0.2, scale="difference")),
        ("gd", LocalSteps(steps=3, lr=0.01, optimizer="adam")),
    ],
)
@pytest.mark.parametrize("batch_size", [None, 8])
def test_local_steps(name: str, local: LocalSteps, batch_size: int | None, tmp_path: Path) -> None:
    compared(tmp_path, METHODS[name], softmax, local=local, batch_size=batch_size)


def test_local_epochs_would_show_how_many_records_a_party_holds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a federation takes local steps, not local epochs"):
        InProcessFederation(tmp_path, METHODS["normec"], plan(2, local=LocalSteps(epochs=1, lr=0.1)))


def test_sampled_parties_with_forgetting(tmp_path: Path) -> None:
    method = METHODS["normec, no server norm, forgetting"]
    federation = InProcessFederation(tmp_path, method, plan(8, participation=FixedSize(2)))
    x = federation.run()
    reference = train(
        whole(softmax),
        method,
        lr=0.5,
        rounds=8,
        seed=7,
        compute=Compute(dtype=torch.float64),
        participation=FixedSize(2),
    )
    torch.testing.assert_close(x, reference.x, rtol=1e-9, atol=1e-12)
    assert len(NODES) == len(reference.state.memory)
    torch.testing.assert_close(federation.server.state.run.memory, reference.state.memory, rtol=1e-9, atol=1e-12)
    federation.server.close()
