"""The runs that `normec theory verify` measures, against loops in NumPy, and checks that can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from normec import Clip21SGD2M, NormEC, theory
from normec.experiments.theory_checks import quadratics
from normec.experiments.theory_checks.checks import Scale, Verification
from normec.experiments.theory_checks.instances import Quadratics, gradient_norms

from . import instances
from .test_client_momentum import run as clip21_sgd2m

ROUNDS = 30
TINY = Scale(3, 3, 2, (10, 30), (5,), (), 5)


def both() -> tuple[instances.Many, Quadratics]:
    """The same random quadratics twice."""
    many = instances.random(4, 3, 5, seed=8)
    H = torch.diag_embed(torch.from_numpy(many.h))
    return many, Quadratics(H, torch.from_numpy(many.c), torch.from_numpy(many.x0))


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_local_steps_of_drawn_clients(steps: int | None, rate: float) -> None:
    many, problem = both()
    eta, gamma = np.array([0.01, 0.05, 0.1, 0.2]), np.array([0.02, 0.05, 0.1, 0.03])
    memory = instances.start_memory(many, np.full(4, 0.5), np.random.default_rng(1))
    source = torch.Generator().manual_seed(3)
    coins = [torch.rand(4, 3, generator=source, dtype=torch.float64).numpy() < rate for _ in range(ROUNDS)]
    expected, _, _ = instances.normec(
        many, 0.5, 0.4, gamma, memory, ROUNDS, steps=steps or 1, local_lr=eta, coins=np.array(coins)
    )
    local = (steps, torch.from_numpy(eta)) if steps is not None else None
    start = torch.from_numpy(memory)
    found = gradient_norms(
        problem, NormEC(0.5, 0.4), torch.from_numpy(gamma), ROUNDS, start, seed=3, local=local, sample_rate=rate
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_client_momentum() -> None:
    many, problem = both()
    zeros, gamma = np.zeros_like(many.c), np.array([0.02, 0.05, 0.1, 0.03])
    same = [np.full(4, value) for value in (0.6, 0.7, 0.5)]
    expected, clipped = clip21_sgd2m(many, *same, gamma, zeros, zeros, ROUNDS)
    method = Clip21SGD2M(tau=0.5, beta=0.7, client_momentum=0.6)
    state = method.client_init(torch.from_numpy(zeros))
    found = gradient_norms(problem, method, torch.from_numpy(gamma), ROUNDS, state)
    assert clipped.any()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["local_steps", "sampled_clients", "clip21_sgd2m"])
def test_a_bound_that_is_too_small_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, found = getattr(theory, name), [Verification(), Verification()]

    def checked(into: Verification) -> None:
        quadratics.local_steps(TINY, into)
        quadratics.client_momentum(TINY, into)

    def too_small(**given: Any) -> Any:
        return right(**given) / 1000

    checked(found[0])
    monkeypatch.setattr(theory, name, too_small)
    checked(found[1])
    assert [one.holds for one in found] == [True, False]
