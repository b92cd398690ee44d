"""Example 1 and the appendix's comparison: what error feedback does to one vector, step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normec import DPSGD, EF21, Clip, Clip21, Logging, NormEC, Problem, SmoothedNorm, train
from normec.problems.functions import FunctionProblem


def example_1() -> FunctionProblem:
    """f_1 = (x−3)²/2, f_2 = (x+3)²/2, minimised at 0, from x⁰ = 2."""
    return Problem.from_functions(
        [lambda x: (x - 3) ** 2 / 2, lambda x: (x + 3) ** 2 / 2], torch.tensor(2.0, dtype=torch.float64)
    )


@pytest.mark.parametrize("lr", [0.01, 1.0])
def test_example_1_direct_normalisation_stands_still(lr: float) -> None:
    run = train(example_1(), DPSGD(SmoothedNorm(0.0)), lr=lr, rounds=100, logging=Logging(every=1))
    assert run.x.tolist() == [2.0]  # −1/1 + 5/5 = 0, to the bit
    assert set(run.history["grad_norm"]) == {2.0}


@pytest.mark.slow
def test_example_1_normec_arrives() -> None:
    run = train(example_1(), NormEC(alpha=1.0, beta=0.5, server_norm=False), lr=0.1, rounds=400)
    assert abs(float(run.x)) < 1e-6
    assert float((run.state.memory[:, 0] - torch.tensor([-3.0, 3.0])).abs().max()) < 1e-6


@pytest.mark.slow
def test_example_1_normec_with_server_normalisation_comes_within_a_step() -> None:
    run = train(example_1(), NormEC(alpha=1.0, beta=0.5), lr=0.01, rounds=600)
    assert abs(float(run.x)) <= 0.05
    assert run.history["grad_norm"][0] == 2.0


@pytest.mark.slow
def test_example_1_clipping_stalls_and_clip21_arrives() -> None:
    stuck = train(example_1(), DPSGD(Clip(0.5)), lr=0.1, rounds=300)
    assert float(stuck.x) == 2.0  # both clients pull with 0.5
    free = train(example_1(), Clip21(0.5), lr=0.1, rounds=300)
    assert abs(float(free.x)) < 1e-6


VECTORS = st.tuples(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([1e-3, 0.4, 3.0, 50.0]))


def two_points(seed: int, d: int, distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """g⁰ and g* exactly so far apart."""
    generator = np.random.default_rng(seed)
    start, away = generator.normal(size=d), generator.normal(size=d)
    away *= distance / np.linalg.norm(away)
    return torch.tensor(start), torch.tensor(start + away)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(points=VECTORS, tau=st.sampled_from([0.07, 0.9, 6.0]))
def test_clipping_arrives_in_as_many_steps_as_the_distance_needs(points: tuple[int, int, float], tau: float) -> None:
    memory, goal = two_points(*points)
    distance = float((goal - memory).norm())
    method, steps = EF21(Clip(tau)), math.ceil(distance / tau)
    for k in range(1, steps + 1):
        _, memory = method.client_step(goal, memory)
        left = float((goal - memory).norm())
        assert left == pytest.approx(max(0.0, distance - k * tau), abs=1e-11)
        assert (left < 1e-11) == (k == steps) or abs(distance - k * tau) < 1e-10


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    points=VECTORS,
    alpha=st.sampled_from([0.0, 0.01, 1.0]),
    beta=st.sampled_from([0.005, 0.5, 1.0, 3.0]),
)
def test_smoothed_normalisation_contracts_by_the_product(
    points: tuple[int, int, float], alpha: float, beta: float
) -> None:
    memory, goal = two_points(*points)
    method = NormEC(alpha, beta)
    left = start = float((goal - memory).norm())
    product = 1.0
    for _ in range(30):
        product *= (1 - beta / (alpha + left)) ** 2 if alpha + left > 0 else 1.0
        message, memory = method.client_step(goal, memory)
        left = float((goal - memory).norm())
        assert left**2 == pytest.approx(start**2 * product, rel=1e-8, abs=1e-20)
        assert float(message.norm()) <= 1 + 1e-15
        if left < 1e-6 * start:  # arrived: what follows is a ratio of roundings
            break


def test_smoothed_normalisation_arrives_when_beta_is_below_alpha() -> None:
    memory, goal = two_points(0, 5, 3.0)
    for _ in range(200):
        _, memory = NormEC(alpha=1.0, beta=0.5).client_step(goal, memory)
    assert float((goal - memory).norm()) < 1e-12


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("decay", "beta", "alpha"), [(0.1, 1.0, 1.0), (0.01, 0.2, 0.15), (0.2, 1.5, 1.0)])
def test_forgetting_rests_at_the_stated_memory_error(decay: float, beta: float, alpha: float) -> None:
    """At rest β m = λ g, so r/(α+r) = λ‖g‖/β, with g on the segment from 0 to g*."""
    goal = torch.tensor([1.2, -0.9, 2.0], dtype=torch.float64)
    memory = torch.zeros_like(goal)
    method = NormEC(alpha, beta, decay=decay)
    for _ in range(5000):
        message, memory = method.client_step(goal, memory)
    r = float((goal - memory).norm())
    c = decay * float(memory.norm()) / beta
    assert r == pytest.approx(alpha * c / (1 - c), rel=1e-6)
    assert float(memory.norm()) == pytest.approx(float(goal.norm()) - r, rel=1e-9)
    assert float((beta * message - decay * memory).norm()) < 1e-9
