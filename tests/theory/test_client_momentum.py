"""The bound of Clip21-SGD2M on random instances, against a loop by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from normec import Clip21SGD2M, Logging, Problem, theory, train
from normec.errors import UsageError

from . import instances

Array = Any


def run(
    problem: instances.Many, p: Array, beta: Array, tau: Array, gamma: Array, v: Array, g: Array, rounds: int
) -> tuple[Array, Array]:
    """‖∇f(x^k)‖ [m, rounds], and how many messages were clipped [m]."""
    p, beta, tau = (one[:, None, None] for one in (p, beta, tau))
    x, clipped = problem.x0.copy(), 0
    norms = np.empty((len(x), rounds))
    for k in range(rounds):
        grads = problem.gradients(x)
        v = p * v + (1 - p) * grads
        length = np.linalg.norm(v - g, axis=-1, keepdims=True)
        g = g + beta * np.minimum(1, tau / np.maximum(length, 1e-300)) * (v - g)
        clipped = clipped + (length > tau).sum((1, 2))
        norms[:, k] = np.linalg.norm(grads.mean(1), axis=-1)
        x = x - gamma[:, None] * g.mean(1)
    return norms, clipped


@pytest.mark.parametrize("start", ["zero", "gradient", "anywhere"])
def test_the_bound_holds_on_a_thousand_instances(start: str) -> None:
    m, rounds = 1000, 80
    rng = np.random.default_rng(len(start))
    problem = instances.random(m, 3, 4, seed=2)
    constants = problem.constants
    p, beta = rng.choice([0, 0.3, 0.9], m), rng.choice([0.2, 0.7, 1.0], m)
    largest = theory.clip21_sgd2m_gamma(L=constants["L"], L_max=constants["L_max"], beta=beta, client_momentum=p)
    gamma = np.minimum(largest * 10 ** rng.uniform(-1.5, 0.3, m), 1 / constants["L"])
    grads = problem.gradients(problem.x0)
    tau = 10 ** rng.uniform(-1, 1.5, m) * np.linalg.norm(grads, axis=-1).max(1)
    away = {"zero": -grads, "gradient": np.zeros_like(grads), "anywhere": rng.normal(size=grads.shape)}[start]
    v = grads + away
    g = v + rng.normal(size=v.shape) * (start == "anywhere")
    known = {**constants, "tau": tau, "beta": beta, "client_momentum": p, "gamma": gamma, "rounds": rounds}
    known["average_error"] = np.linalg.norm(away, axis=-1).max(1)
    known["memory_gap"] = np.linalg.norm(v - g, axis=-1).max(1)
    bound = theory.clip21_sgd2m(**known)
    norms, clipped = run(problem, p, beta, tau, gamma, v, g, rounds)
    measured = np.sqrt((norms**2).mean(1))
    assert (measured <= bound * (1 + 1e-9)).all()
    assert (clipped == 0).any()
    assert start == "gradient" or (clipped > 0).any()
    assert float(np.median(bound / measured)) < 50


def test_without_momentum_and_clipping_it_is_gradient_descent() -> None:
    numbers = {"L": 2.0, "L_max": 5.0, "F0": 3.0, "beta": 1.0, "client_momentum": 0.0, "rounds": 400}
    found = theory.clip21_sgd2m(**numbers, tau=1e6, gamma=0.5, average_error=7.0)
    assert found == pytest.approx(theory.gradient_descent(L=2.0, F0=3.0, rounds=400))
    assert theory.clip21_sgd2m_gamma(L=2.0, L_max=5.0, beta=1.0, client_momentum=0.0) == 0.5


@pytest.mark.slow
def test_it_falls_like_one_over_the_root_of_the_rounds() -> None:
    """Also if messages are clipped at the start, because memories catch up with gradients of any size."""
    numbers = {"L": 1.0, "L_max": 1.0, "F0": 1.0, "beta": 0.5, "client_momentum": 0.5, "gamma": 0.005, "tau": 0.3}
    few, many = (theory.clip21_sgd2m(**numbers, rounds=rounds, average_error=1.5) for rounds in (600, 9600))
    assert many == pytest.approx(few / 4, rel=1e-6)
    assert theory.clip21_sgd2m(**{**numbers, "tau": 9.0}, rounds=600, average_error=1.5) < few


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_bound_that_outgrows_all_numbers_is_infinite(p: float) -> None:
    numbers = {"L": 1.0, "L_max": 3.0, "F0": 1.0, "tau": 1e-3, "beta": 0.1, "client_momentum": p, "average_error": 1.0}
    small, large = theory.clip21_sgd2m(**numbers, gamma=np.array([1e-6, 1.0]), rounds=2000)
    assert small < 40
    assert large == np.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("start", [{"average_error": 1.0}, {"average_error": 0.0, "memory_gap": 1.0}])
def test_a_memory_that_hardly_moves_has_a_finite_bound(start: dict[str, float]) -> None:
    """1 − (1−β)² of such a β rounds to 0. Memories stay where they are, 1 away, and x does not move."""
    numbers = {"L": 1.0, "L_max": 1.0, "F0": 1e-3, "tau": 9.0, "client_momentum": 0.0, "gamma": 1e-4, "rounds": 10}
    still = theory.clip21_sgd2m(**numbers, beta=1e-17, **start)
    assert np.isfinite(still)
    assert still == pytest.approx(theory.clip21_sgd2m(**numbers, beta=1e-9, **start), rel=1e-6)


def test_a_run_keeps_the_promise() -> None:
    centres = torch.tensor([[3.0, 0.0], [-1.0, 2.0], [0.0, -4.0]], dtype=torch.float64)
    clients = [lambda x, c=c: 0.5 * ((x - c) ** 2).sum() for c in centres]
    problem = Problem.from_functions(clients, torch.full((2,), 5.0, dtype=torch.float64))
    gamma = theory.clip21_sgd2m_gamma(L=1.0, L_max=1.0, beta=0.8, client_momentum=0.6)
    method = Clip21SGD2M(tau=1.0, beta=0.8, client_momentum=0.6)
    history = train(problem, method, lr=gamma, rounds=300, logging=Logging(every=1)).history
    start = float(torch.linalg.vector_norm(5.0 - centres, dim=1).max())
    F0 = 0.5 * float(((5.0 - centres.mean(0)) ** 2).sum())
    bound = theory.clip21_sgd2m(
        L=1.0, L_max=1.0, F0=F0, tau=1.0, beta=0.8, client_momentum=0.6, gamma=gamma, rounds=300, average_error=start
    )
    assert np.sqrt(np.mean(np.square(history["grad_norm"][:300]))) <= bound


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gamma": 0.6}, "gamma must be at most 1/L = 0.5, got 0.6"),
        ({"beta": 1.5}, "beta must be at most 1 = 1, got 1.5"),
        ({"client_momentum": 1.0}, "client_momentum must be < 1 = 1, got 1"),
        ({"tau": 0.0}, "tau must be > 0 and finite, got 0"),
    ],
)
def test_values_out_of_range_are_refused(changed: dict[str, float], message: str) -> None:
    numbers: dict[str, Any] = {"L": 2.0, "L_max": 2.0, "F0": 1.0, "tau": 1.0, "beta": 1.0, "client_momentum": 0.5}
    with pytest.raises(UsageError, match=message):
        theory.clip21_sgd2m(**{**numbers, "gamma": 0.1, "rounds": 5, "average_error": 1.0, **changed})
