"""The bound for local steps, and the two facts that it rests on, on random instances."""

from __future__ import annotations

import numpy as np
import pytest

from normec import theory
from normec.errors import UsageError

from . import instances


def problems(m: int, convex: bool) -> instances.Many:
    found = instances.random(m, 3, 4, seed=int(convex))
    return instances.Many(np.abs(found.h), found.c, found.x0) if convex else found


@pytest.mark.parametrize("convex", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_updates_are_lipschitz_and_near_the_gradient(steps: int, convex: bool) -> None:
    m = 1000
    rng = np.random.default_rng(steps)
    problem = problems(m, convex)
    L_max = problem.constants["L_max"]
    eta = rng.uniform(0.01, 2, m) / L_max
    known = {"L_max": L_max, "steps": steps, "local_lr": eta, "convex": convex}
    x, z = problem.x0, problem.x0 + rng.normal(size=problem.x0.shape)
    here, there = (instances.updates(problem, point, steps, eta) for point in (x, z))
    apart = np.linalg.norm(here - there, axis=-1).max(1)
    assert (apart <= theory.local_smoothness(**known) * np.linalg.norm(x - z, axis=-1) * (1 + 1e-9)).all()
    grads = problem.gradients(x)
    B = np.linalg.norm(grads, axis=-1).max(1)
    away = np.linalg.norm(here - grads, axis=-1).max(1)
    assert (away <= theory.local_drift(**known, B=B) * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("convex", [False, True])
@pytest.mark.parametrize("steps", [2, 7])
def test_the_bound_holds_on_a_thousand_instances(steps: int, convex: bool) -> None:
    m, rounds = 1000, 60
    rng = np.random.default_rng(10 + steps)
    problem = problems(m, convex)
    constants = problem.constants
    eta = 10 ** rng.uniform(-3, 0, m) / constants["L_max"]
    alpha, R = 10 ** rng.uniform(-2, 0.5, m), 10 ** rng.uniform(-1.5, 1, m)
    beta = alpha * rng.uniform(0.05, 1, m)
    local = {"steps": steps, "local_lr": eta}
    smoothness = theory.local_smoothness(L_max=constants["L_max"], convex=convex, **local)
    gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=smoothness) * rng.uniform(0.3, 1, m)
    memory = instances.start_memory(problem, R, rng, **local)
    norms, before, _ = instances.normec(problem, alpha, beta, gamma, memory, rounds, **local)
    assert (before.max(1) <= R * (1 + 1e-9)).all()  # the memories follow the updates
    grad_max = np.linalg.norm(problem.gradients(problem.x0), axis=-1).max(1)
    B = theory.gradient_bound(grad_max=grad_max, L_max=constants["L_max"], gamma=gamma, rounds=rounds)
    common = {**constants, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds, "B": B, **local}
    found = [theory.local_steps(**common, convex=convex, form=form) for form in ("tracked", "sharper", "corrected")]
    assert (norms.mean(1) <= found[0] * (1 + 1e-9)).all()
    assert (found[0] <= found[1] * (1 + 1e-9)).all()
    assert (found[1] <= found[2] * (1 + 1e-9)).all()


def test_one_step_is_theorem_2() -> None:
    numbers = {"L": 1.0, "L_max": 2.0, "R": 0.3, "alpha": 0.5, "beta": 0.4, "gamma": 0.02, "rounds": 50, "F0": 3.0}
    noise = {"sigma": 0.1, "dim": 7, "clients": 5, "start_gap": 0.2, "warmup": 3}
    for form in ("corrected", "sharper", "tracked"):
        expected = theory.theorem2(**numbers, **noise, form=form)
        assert theory.local_steps(**numbers, **noise, steps=1, local_lr=0.7, B=9.0, form=form) == pytest.approx(
            expected
        )
    several = theory.local_steps(**numbers, **noise, steps=9, local_lr=1e-9, B=9.0)
    assert several == pytest.approx(theory.theorem2(**numbers, **noise, form="sharper"), rel=1e-6)


def test_a_convex_bound_needs_a_small_local_step() -> None:
    with pytest.raises(UsageError, match=r"local_lr must be at most 2/L_max = 1, got 1.5"):
        theory.local_drift(L_max=2.0, steps=3, local_lr=1.5, B=1.0, convex=True)


def test_a_convex_bound_of_one_step_holds_for_any_local_step() -> None:
    """One step sends the gradient, whatever its size is. 2/L_max is below 1, which is the default of `local_lr`."""
    assert theory.local_smoothness(L_max=4.0, steps=1, local_lr=3.0, convex=True) == 4.0
    assert theory.local_drift(L_max=4.0, steps=1, local_lr=3.0, B=7.0, convex=True) == 0.0
    numbers = {"L": 1.0, "L_max": 4.0, "R": 0.3, "alpha": 0.5, "beta": 0.4, "gamma": 0.02, "rounds": 50, "F0": 3.0}
    either = [theory.sampled_clients(**numbers, sample_rate=0.5, convex=convex) for convex in (True, False)]
    assert either[0] == pytest.approx(either[1], rel=1e-12)
    one = theory.local_steps(**numbers, steps=1, local_lr=3.0, B=7.0, convex=True)
    assert one == pytest.approx(theory.theorem1(**numbers, form="sharper"), rel=1e-12)
    with pytest.raises(UsageError, match=r"local_lr must be at most 2/L_max = 0.5, got 3"):
        theory.local_smoothness(L_max=4.0, steps=np.array([1, 2]), local_lr=3.0, convex=True)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("rate", [0.2, 0.7])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_bound_with_sampled_clients_holds_in_expectation(steps: int, rate: float) -> None:
    """The expected errors of the memories, and the mean of the gradients' norms, over 200 draws of the clients."""
    m, rounds, draws = 30, 40, 200
    rng = np.random.default_rng(steps)
    problem = problems(m, False)
    constants = problem.constants
    eta = 10 ** rng.uniform(-3, -1, m) / constants["L_max"]
    alpha, R = 10 ** rng.uniform(-1, 0.5, m), 10 ** rng.uniform(-1, 0.5, m)
    beta = alpha * rng.uniform(0.2, 1, m)
    local = {"steps": steps, "local_lr": eta}
    gamma = 0.02 / constants["L_max"] * rng.uniform(0.3, 1, m)
    memory = instances.start_memory(problem, R, rng, **local)
    known = {**constants, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds}
    shape = (rounds, *memory.shape[:2])
    coins = np.concatenate([np.random.default_rng(seed).uniform(size=shape) < rate for seed in range(draws)], axis=1)
    # All draws at once: the instances are repeated for each of them.
    repeated = [np.concatenate([one] * draws) for one in (problem.h, problem.c, problem.x0)]
    many = [np.tile(one, draws) for one in (alpha, beta, gamma, eta)]
    found, _, after = instances.normec(
        instances.Many(*repeated),
        *many[:3],
        np.concatenate([memory] * draws),
        rounds,
        coins=coins,
        steps=steps,
        local_lr=many[3],
    )
    norms, errors = found.mean(1).reshape(draws, m).mean(0), after.reshape(draws, m, rounds).mean(0).T
    grad_max = np.linalg.norm(problem.gradients(problem.x0), axis=-1).max(1)
    B = theory.gradient_bound(grad_max=grad_max, L_max=constants["L_max"], gamma=gamma, rounds=rounds)
    assert (norms <= theory.sampled_clients(**known, **local, sample_rate=rate, B=B)).all()
    w, largest = R.copy(), R.copy()
    move = gamma * theory.local_smoothness(L_max=constants["L_max"], **local)
    for k in range(rounds):
        w = w * (1 - rate * beta / (alpha + largest))
        assert (errors[k] <= w + 0.1 * R).all(), k
        w, largest = w + move, largest + move


def test_clients_that_are_never_or_always_drawn() -> None:
    numbers = {"L": 1.0, "L_max": 2.0, "R": 0.3, "alpha": 0.5, "beta": 0.4, "gamma": 0.02, "rounds": 50, "F0": 3.0}
    noise = {"sigma": 0.1, "dim": 7, "clients": 5, "start_gap": 0.2}
    always = theory.sampled_clients(**numbers, **noise, sample_rate=1.0)
    assert always >= theory.theorem2(**numbers, **noise, form="tracked")
    still = theory.sampled_clients(**{**numbers, "gamma": 1e-9}, sample_rate=1e-12)
    assert still == pytest.approx(3.0 / (1e-9 * 50) + 2 * 0.3)
    with pytest.raises(UsageError, match=r"beta must be at most alpha = 0.5, got 0.6"):
        theory.sampled_clients(**{**numbers, "beta": 0.6}, sample_rate=0.5)


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 1e5), (0.5, 1e5), (0.2, 3e4)])
def test_where_the_errors_of_sampled_clients_settle(rate: float, beta: float) -> None:
    """For a large α, at γΛ(α/(qβ) − 1) after a round and γΛ more before it; without lag at zero."""
    alpha, move = 1e5, 0.01
    before = move * alpha / (rate * beta)
    numbers = {"L": 1.0, "L_max": 1.0, "alpha": alpha, "beta": beta, "gamma": move, "rounds": 500, "F0": 1.0}
    found = theory.sampled_clients(**numbers, R=before, sample_rate=rate)
    others = 1 / (move * 500) + move / 2
    assert found == pytest.approx(others + 2 * (before - move), rel=1e-4)


def test_several_local_steps_of_sampled_clients_need_a_bound_of_the_gradients() -> None:
    """Without it the drift would count as zero."""
    numbers = {"L": 1.0, "L_max": 1.0, "R": 0.3, "alpha": 0.5, "beta": 0.4, "gamma": 0.02, "rounds": 50, "F0": 3.0}
    with pytest.raises(UsageError, match=r"the drift of 5 local steps is a multiple of B, which is missing; give B"):
        theory.sampled_clients(**numbers, sample_rate=0.5, steps=5, local_lr=0.1)
    drift = theory.local_drift(L_max=1.0, steps=5, local_lr=0.1, B=2.0)
    still, moving = (theory.sampled_clients(**numbers, sample_rate=0.5, steps=5, local_lr=0.1, B=B) for B in (0.0, 2.0))
    assert moving == pytest.approx(still + 2 * drift)
