"""A federation's server moves x by an optimizer of its own, on a schedule, and averages: as the one-process engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import Averaging, Clip21, Compute, Logging, LRSchedule, NormEC, Privacy, ServerOptimizer, UsageError, train
from normec.algorithms.lr_schedule import scheduled
from normec.federation.flower import settings
from normec.training.client_weights import checked_weights

from .in_process import OPEN, InProcessFederation, plan, softmax, whole

ROUNDS = 8


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("restart", [None, 3, 5])
def test_the_same_trajectory_also_after_a_restart(tmp_path: Path, restart: int | None) -> None:
    schedule, average = LRSchedule("cosine", ramp_up=2), Averaging("polyak", start=4)
    optimizer = ServerOptimizer("adamw", weight_decay=0.1)
    method = NormEC(alpha=0.01, beta=0.1)
    measured: list[torch.Tensor] = []

    def evaluate(x: torch.Tensor) -> dict[str, float]:
        measured.append(x.clone())
        return {}

    planned = plan(ROUNDS, server_optimizer=optimizer, averaging=average)
    planned = replace(planned, lr=scheduled(schedule, 0.05, ROUNDS, 0))
    federation = InProcessFederation(tmp_path, method, planned, evaluate=evaluate)
    while not federation.server.finished:
        if federation.server.round == restart:
            federation.restart_server()
            restart = None
        federation.round()
    run = federation.server.finish()
    reference = train(
        whole(softmax),
        method,
        lr=0.05,
        rounds=ROUNDS,
        seed=7,
        lr_schedule=schedule,
        server_optimizer=optimizer,
        averaging=average,
        compute=Compute(dtype=torch.float64, engine="loop"),
        logging=Logging(every=1),
    )
    torch.testing.assert_close(run.x, reference.x, rtol=1e-9, atol=1e-12)
    assert run.state.optimizer.keys() == reference.state.optimizer.keys()
    for name, value in reference.state.optimizer.items():
        torch.testing.assert_close(run.state.optimizer[name], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(measured[-1], reference.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.state.estimate, run.state.memory.mean(0), rtol=1e-9, atol=1e-12)
    federation.server.close()


@pytest.mark.parametrize("weights", [(0.2, 0.2, 0.2, 0.2, 0.2), (0.4, 0.3, 0.15, 0.1, 0.05)])
def test_adambc_knows_the_noise_of_the_parties(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """Five parties with σ each, of which one is away in round 1: σ² Σ w_i² over those that answer."""
    privacy = Privacy(sigma=0.5, delta=1e-5, unit="client", relation="zero-out", trust="local", memory="clean")
    relative = checked_weights(weights, 5)
    planned = plan(3, lr=0.01, server_optimizer=ServerOptimizer("adambc", floor=1e-4), weights=relative)
    policy = OPEN.model_copy(update={"epsilon": 1e6, "delta": 1e-5})
    federation = InProcessFederation(tmp_path, Clip21(0.2, decay=0.1), planned, privacy=privacy, policy=policy)
    federation.round()
    requests = federation.server.requests()
    for node in list(requests)[1:]:
        federation.server.receive(node, federation.ask(node, requests[node]))
    federation.server.close_round()
    squares = [weight**2 for weight in weights]
    variance = 0.5**2 * (0.9**2 * sum(squares) + sum(squares[1:]))
    assert float(federation.server.state.run.optimizer["noise_variance"]) == pytest.approx(variance, rel=1e-12)
    federation.server.close()


def test_a_flower_app_takes_them_by_name() -> None:
    given: dict[str, Any] = {"server_optimizer": "adam", "server_optimizer_settings": "betas=[0.9,0.99]"}
    assert settings.read(given).run.server_optimizer == "adam"
    for wrong, words in (
        ({"server_optimizer": "adan"}, "unknown server_optimizer"),
        ({"server_optimizer_settings": "eps=1"}, "server_optimizer_settings goes with server_optimizer"),
        ({"lr_schedule": "ReduceLROnPlateau"}, "reads what the run measures"),
        ({"averaging": "mean"}, "averaging"),
    ):
        with pytest.raises(UsageError, match=words):
            settings.read(wrong)
