"""SCAFFOLD, against a loop in NumPy written from the formula, and in the limits where it is federated averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normec
from normec import DPSGD, Clip, Compute, FixedSize, LocalSteps, Privacy, Scaffold, train
from normec.errors import UsageError
from normec.privacy.mechanism import facts_of

from ..support.reference import Logistic, Vector, clip
from ..support.runs import InterruptAt

N, D, RECORDS, ROUNDS, K = 5, 4, 6, 50, 4
LOCAL = LocalSteps(steps=K, lr=0.1)
DRAW = np.random.default_rng(2)
DATA = Logistic(
    [DRAW.normal(size=(RECORDS, D)) + i - 2 for i in range(N)],
    [np.sign(DRAW.normal(size=RECORDS)) for _ in range(N)],
    0.0,
)


def problem(alike: bool = False) -> Any:
    sets = [(torch.from_numpy(DATA.a[j]), (torch.from_numpy(DATA.y[j]) > 0).double()) for j in _which(alike)]
    model = torch.nn.Sequential(torch.nn.Linear(D, 1, bias=False, dtype=torch.float64), torch.nn.Flatten(0))
    torch.nn.init.zeros_(model[0].weight)
    return normec.Problem(model, torch.nn.BCEWithLogitsLoss(), [torch.utils.data.TensorDataset(*one) for one in sets])


def _which(alike: bool) -> list[int]:
    return [0] * N if alike else list(range(N))


def by_hand(tau: float, lr: float, drawn: FixedSize | None, rounds: int = ROUNDS) -> tuple[Vector, Vector, Vector]:
    """x, c and the c_i after all rounds."""
    x, c, own = np.zeros(D), np.zeros(D), np.zeros((N, D))
    for k in range(rounds):
        chosen = range(N) if drawn is None else drawn.draw(N, k, 1).tolist()  # type: ignore[union-attr]
        total, change = np.zeros(D), np.zeros(D)
        for i in chosen:
            y = x.copy()
            for _ in range(K):
                y = y - 0.1 * (DATA.grad(i, y) + c - own[i])
            update = (x - y) / (K * 0.1)
            message = clip(np.concatenate([update, update - c]), tau)
            total += message[:D]
            change += message[D:]
            own[i] = own[i] + message[D:]
        x = x - lr * total / N
        c = c + change / N
    return x, c, own


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("engine", ["loop", pytest.param("batched", marks=pytest.mark.slow)])
@pytest.mark.parametrize("privacy", [None, Privacy(sigma=1e-13, trust="secure-sum")], ids=["plain", "private"])
@pytest.mark.parametrize("drawn", [pytest.param(None, marks=pytest.mark.slow), FixedSize(3)], ids=["all", "drawn"])
@pytest.mark.parametrize("tau", [0.3, pytest.param(100.0, marks=pytest.mark.slow)])
def test_it_follows_the_formula(tau: float, drawn: FixedSize | None, privacy: Privacy | None, engine: str) -> None:
    run = train(
        problem(),
        Scaffold(tau),
        lr=0.2,
        rounds=ROUNDS,
        seed=1,
        local=LOCAL,
        participation=drawn,
        privacy=privacy,
        compute=Compute(engine=engine),
    )
    x, c, own = by_hand(tau, 0.2, drawn)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.server["control"].numpy(), c, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.clients["control"].numpy(), own, rtol=0, atol=1e-10)
    np.testing.assert_allclose(own.mean(0), c, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_clients_that_are_alike_average_their_models() -> None:
    options: dict[str, Any] = {"lr": 0.4, "rounds": 20, "seed": 1, "local": LOCAL}
    found = train(problem(alike=True), Scaffold(1e9), **options).x
    assert torch.allclose(found, train(problem(alike=True), DPSGD(Clip(1e9)), **options).x, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_it_reaches_the_optimum_where_averaging_stays_away() -> None:
    """With constant local steps on clients that differ, averaging has a bias and SCAFFOLD has none."""
    bowls = [lambda x, a=a, c=c: (a * (x - c) ** 2).sum() for a, c in ((0.2, 0.0), (2.0, 4.0))]
    of = normec.Problem.from_functions(bowls, torch.zeros(1, dtype=torch.float64))
    best = (0.2 * 0 + 2 * 4) / 2.2
    local = LocalSteps(steps=10, lr=0.1)
    options: dict[str, Any] = {"lr": 0.5, "rounds": 400, "local": local}
    assert float(train(of, Scaffold(1e9), **options).x) == pytest.approx(best, abs=1e-6)
    assert abs(float(train(of, DPSGD(Clip(1e9)), **options).x) - best) > 0.1


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 0.2, "rounds": 15, "seed": 1, "local": LOCAL, "participation": FixedSize(2)}
    options |= {"storage": normec.Storage(checkpoint_seconds=0.0), "privacy": Privacy(epsilon=5, trust="secure-sum")}
    with pytest.raises(KeyboardInterrupt):
        train(problem(), Scaffold(0.5), callbacks=[InterruptAt(7)], out=tmp_path / "run", **options)
    run, whole = (train(problem(), Scaffold(0.5), out=out, **options) for out in (tmp_path / "run", tmp_path / "whole"))
    assert torch.equal(run.x, whole.x)
    assert torch.equal(run.state.clients["control"], whole.state.clients["control"])


def test_both_parts_are_covered_by_one_bound() -> None:
    """The message has twice the numbers, and its whole length is what the noise is drawn for."""
    method = Scaffold(0.5)
    assert facts_of(method, D).bound == 0.5
    update = 1e6 * torch.ones(1, D, dtype=torch.float64)
    public = {"control": -1e6 * torch.ones(D, dtype=torch.float64)}
    message, _ = method.message(update, {"control": torch.zeros(1, D, dtype=torch.float64)}, None, public)
    assert message.shape == (1, 2 * D)
    assert float(message.norm()) == pytest.approx(0.5)


def test_it_needs_local_steps_in_the_gradients_scale() -> None:
    for local in (None, LocalSteps(steps=2, lr=0.1, scale="difference")):
        with pytest.raises(UsageError, match="corrects local steps"):
            train(problem(), Scaffold(1.0), lr=0.1, rounds=2, local=local)
