"""Every kind of method in real secure sums: the path of `train` without noise, and its ε with noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normec import (
    DPSGD,
    AdaptiveClip,
    Averaging,
    Clip,
    Clip21,
    Clip21SGD2M,
    Compute,
    LocalSteps,
    Method,
    MomentumNormEC,
    NormEC,
    Privacy,
    Run,
    Scaffold,
    ServerOptimizer,
    train,
)
from normec.algorithms import registry
from normec.federation.protocol.account import read_releases

from .summing_hospitals import NODES, OPEN, SummingHospitals, problem

ROUNDS, LR = 5, 0.3
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
NAMES = ["normec", "normec-momentum", "clip21", "clip21-sgd2m", "dpsgd", "scaffold", "adaptive-clip"]
POLICY = OPEN.model_copy(update={"methods": NAMES})
PRIVATE = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4)
LOCAL = LocalSteps(steps=3, lr=0.1)
PROXIMAL = LocalSteps(steps=3, lr=0.1, prox=0.5, scale="difference")
AVERAGED = {"server_optimizer": ServerOptimizer("adamw"), "averaging": Averaging("polyak", start=2), "lr": 0.05}

CASES: dict[str, tuple[Method, dict[str, Any]]] = {
    "scaffold, weighted": (Scaffold(0.5), {"local": LOCAL, "weights": WEIGHTS}),
    "scaffold": (Scaffold(0.5), {"local": LOCAL}),
    "dpsgd-adaptive": (AdaptiveClip(DPSGD(Clip(0.2))), {}),
    "dpsgd-adaptive, local steps": (AdaptiveClip(DPSGD(Clip(0.2))), {"local": LOCAL, "weights": WEIGHTS}),
    "clip21-adaptive, weighted": (AdaptiveClip(Clip21(0.2)), {"weights": WEIGHTS}),
    "clip21-sgd2m, adaptive": (AdaptiveClip(Clip21SGD2M(0.2, 0.5, 0.6)), {}),
    "clip21-sgd2m": (Clip21SGD2M(0.2, 0.5, 0.6), {"weights": WEIGHTS}),
    "normec-momentum": (MomentumNormEC(0.1, 0.3, 0.6), {}),
    "fed-normec": (NormEC(0.1, 0.3), {"local": LOCAL, "weights": WEIGHTS}),
    "fed-normec, batches": (NormEC(0.1, 0.3), {"local": LOCAL, "batch_size": 4}),
    "fedprox, weighted": (DPSGD(Clip(0.3)), {"local": PROXIMAL, "weights": WEIGHTS}),
    "adam at the server": (
        NormEC(0.1, 0.3),
        {"server_optimizer": ServerOptimizer("adam"), "weights": WEIGHTS, "lr": 0.05},
    ),
    "adamw at the server, averaged": (Clip21(0.2), AVERAGED),
}


def summed(name: str, folder: Path, privacy: Privacy | None) -> Run:
    """The server's run; with noise, every party has paid the same."""
    method, how = CASES[name]
    weights = torch.tensor(how["weights"], dtype=torch.float64) * len(NODES) if "weights" in how else None
    changes = {"lr": LR, **how, "weights": weights}
    federation = SummingHospitals(folder, method, ROUNDS, privacy, POLICY, plan_changes=changes)
    try:
        federation.run()
        run = federation.server.finish()
        if privacy is not None:
            assert run.privacy is not None
            for node in NODES:
                paid = read_releases(federation.home(node)).epsilon("client", privacy.delta)
                assert paid == pytest.approx(run.privacy.epsilon, rel=1e-9)
        return run
    finally:
        federation.close()


def trained(name: str, privacy: Privacy | None = None) -> Run:
    method, how = CASES[name]
    compute = Compute(dtype=torch.float64, engine="loop")
    return train(
        problem(), method, **{"lr": LR, "rounds": ROUNDS, "seed": 7, "compute": compute, **how}, privacy=privacy
    )


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", CASES)
def test_without_noise_x_is_that_of_a_simulation(name: str, tmp_path: Path) -> None:
    run, expected = summed(name, tmp_path, None), trained(name)
    assert float((expected.x - problem().x0).abs().max()) > 0.05, "x has moved"
    torch.testing.assert_close(run.x, expected.x, rtol=0, atol=1e-9)
    assert run.state.server.keys() == expected.state.server.keys()
    for kind, value in expected.state.server.items():  # estimates, thresholds, control variates
        torch.testing.assert_close(run.state.server[kind], value, rtol=0, atol=1e-9)


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", CASES)
def test_with_noise_epsilon_is_that_of_a_simulation(name: str, tmp_path: Path) -> None:
    """Of three parties in a sum, one may help the server: the noise of two is counted."""
    run = summed(name, tmp_path, PRIVATE)
    simulated = trained(name, Privacy(**{**PRIVATE.to_dict(), "honest": 2, "memory": "clean"}))
    assert run.privacy is not None
    assert simulated.privacy is not None
    assert run.privacy.epsilon == simulated.privacy.epsilon
    assert run.privacy.releases == simulated.privacy.releases == ROUNDS


def test_what_a_method_keeps_in_an_attribute_reaches_no_later_round(tmp_path: Path) -> None:
    """No rule knows of it: a record would move later messages by more than they are charged."""
    name = f"{Path(__file__).parent / 'methods' / 'wrong_methods.py'}:HiddenMomentum"
    records = Privacy(sigma=0.2, trust="secure-sum", delta=1e-4, unit="record", record_clip="auto")
    policy, found = OPEN.model_copy(update={"methods": ["dpsgd", name]}), []
    for number, method in enumerate((DPSGD(Clip(1.0)), registry.build(name, {"tau": 1.0}))):
        federation = SummingHospitals(tmp_path / str(number), method, 3, records, policy, records=[40.0])
        found.append(federation.run())
        federation.close()
    assert torch.equal(*found)
