"""Theorem 2, Corollary 2, forgetting: against seeds, against brute force, against what is known for free."""

from __future__ import annotations

import numpy as np
import pytest

from normec import theory
from normec.errors import UsageError
from normec.theory.forgetting import gamma_max as gamma_max_of_forgetting
from normec.theory.private import _mean_root

from . import instances


def isotropic(dim: int, clients: int, distance: float, seeds: int) -> instances.Many:
    x0 = np.zeros((seeds, dim))
    x0[:, 0] = distance
    return instances.Many(np.ones((seeds, clients, dim)), np.zeros((seeds, clients, dim)), x0)


def test_theorem_2_is_broken_as_stated_and_holds_as_corrected() -> None:
    """½‖x‖² in 20,000 dimensions, one client: the stated bound is 0.62, no round comes under 1.2."""
    dim, seeds, rounds = 20_000, 4, 100
    problem = isotropic(dim, 1, 1.41, seeds)
    common = {
        "L": 1.0, "L_max": 1.0, "R": 0.1, "alpha": 0.1, "beta": 0.1, "gamma": 0.05, "rounds": rounds,
        "F0": 1.41**2 / 2, "sigma": 0.1, "dim": dim, "clients": 1,
    }  # fmt: skip
    memory = instances.start_memory(problem, np.full(seeds, 0.1), np.random.default_rng(0))
    norms, _, _ = instances.normec(problem, 0.1, 0.1, 0.05, memory, rounds, sigma=0.1)
    measured = norms.mean(0).min()
    assert theory.theorem2(**common, form="paper") < 0.63 < 1.2 < measured
    assert measured <= theory.theorem2(**common, form="sharper") <= theory.theorem2(**common)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_the_corrected_bounds_hold_over_seeds(decay: float) -> None:
    """Where they are informative: many clients, small noise; 40 instances, 5 seeds each."""
    m, seeds, clients, dim, rounds = 40, 5, 50, 4, 200
    problem = instances.random(m, clients, dim, seed=7)
    constants = problem.constants
    alpha, R = np.full(m, 1.0), np.full(m, 0.8)
    beta = np.full(m, 0.9 * (1 - decay))
    B = np.linalg.norm(problem.gradients(problem.x0), axis=-1).max(1)
    memory = instances.start_memory(problem, R, np.random.default_rng(1))
    gamma = 0.5 * theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=constants["L_max"])
    if decay:
        gamma = gamma * 0.1
        B = theory.gradient_bound(grad_max=B, L_max=constants["L_max"], gamma=gamma, rounds=rounds)
        good = gamma_max_of_forgetting(beta=beta, R=R, alpha=alpha, L_max=constants["L_max"], decay=decay, B=B) >= gamma
        assert good.sum() >= 5
    _, _, after = instances.normec(problem, alpha, beta, gamma, memory, rounds, sigma=0.2, decay=decay)
    errors = theory.memory_errors(
        R0=R, alpha=alpha, beta=beta, drift=gamma * constants["L_max"], rounds=rounds, decay=decay, B=B
    )
    assert (after <= errors * (1 + 1e-9)).all()
    runs = [
        instances.normec(problem, alpha, beta, gamma, memory, rounds, sigma=0.2, decay=decay, seed=seed)[0]
        for seed in range(seeds)
    ]
    measured = np.mean(runs, axis=0).mean(1)
    common = {
        **constants, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds, "sigma": 0.2,
        "dim": dim, "clients": clients,
    }  # fmt: skip
    if not decay:
        assert (measured <= theory.theorem2(**common, form="tracked")).all()
        assert (measured <= theory.theorem2(**common)).all()
        return
    assert (measured <= theory.forgetting(**common, decay=decay, B=B, form="tracked")).all()
    kept = {key: value[good] if isinstance(value, np.ndarray) else value for key, value in common.items()}
    assert (measured[good] <= theory.forgetting(**kept, decay=decay, B=B[good])).all()


def test_the_noise_in_the_estimate_is_the_walk_and_the_stationary_process() -> None:
    """E‖ĝ − mean g_i‖² over 4,000 seeds against β²σ²d(…)/n."""
    rng = np.random.default_rng(0)
    beta, sigma, dim, clients, rounds = 0.3, 0.7, 3, 4, 60
    for decay in (0.0, 0.1):
        e = np.zeros((4000, dim))
        for _ in range(rounds):
            e = (1 - decay) * e + beta * sigma * rng.normal(size=(4000, clients, dim)).mean(1)
        measured = np.sqrt((e**2).sum(1).mean())
        stated = beta * sigma * np.sqrt(dim / clients) * theory.noise_factor(decay, rounds)
        assert measured == pytest.approx(stated, rel=0.03)
    assert theory.noise_factor(0.0, 60) == pytest.approx(np.sqrt(60))
    assert theory.noise_factor(0.1, 10**6) == pytest.approx(1 / np.sqrt(0.1 * 1.9))


def test_the_mean_of_roots_is_bounded_from_above() -> None:
    for rounds in (1, 2, 10, 1000):
        for warmup in (0, 1, 50):
            exact = np.sqrt(np.arange(warmup + 1, warmup + rounds + 1)).mean()
            assert exact <= _mean_root(rounds, warmup) * (1 + 1e-12) <= exact * 1.1


def test_corollary_2_never_beats_the_start() -> None:
    """β_0 < α, as it asks: 5,000 instances, with F0 as small as smoothness allows."""
    rng = np.random.default_rng(2)
    m = 5000
    L, grad0, R, alpha, S = (10 ** rng.uniform(-2, 2, m) for _ in range(5))
    S = S * 1e-3
    L_max = L * rng.uniform(1, 5, m)
    F0 = grad0**2 / (2 * L) * rng.choice([1.0, 1.0, 3.0], m)
    beta0 = np.minimum(theory.best_beta0(L_max=L_max, alpha=alpha, R=R, F0=F0, S=S), 0.999 * alpha)
    common = {"L": L, "L_max": L_max, "R": R, "alpha": alpha, "F0": F0, "S": S, "rounds": 10_000}
    stated = theory.corollary2(**common, beta0=beta0, form="paper")
    assert (stated >= 2 * grad0).all()
    free = np.array([
        theory.corollary2(**{k: (v[i] if k != "rounds" else 10**9) for k, v in common.items()}) for i in range(300)
    ])  # fmt: skip
    assert (free < grad0[:300]).any()  # asking β ≤ α instead, it says something
    limit = theory.largest_signal(alpha=alpha, R=R, grad0=grad0)
    assert (S[:300][free < grad0[:300]] < limit[:300][free < grad0[:300]]).all()


def test_best_beta0_and_the_closed_value() -> None:
    common = {"L_max": 2.0, "alpha": 0.1, "R": 0.5, "F0": 3.0, "S": 1e-3}
    best = theory.best_beta0(**common)
    value = theory.corollary2(L=1.0, **common, rounds=10**12)
    assert value == pytest.approx(2 * np.sqrt(2 * 1e-3 * 2.0 * 0.6 * 3.0 / 0.5) + 1.0)
    for factor in (0.9, 1.1):
        assert theory.corollary2(L=1.0, **common, rounds=10**12, beta0=best * factor) > value


def test_how_many_clients_a_promise_needs() -> None:
    noise = theory.noise_per_message(8.0, 1e-5)
    assert noise == pytest.approx(10.396 / np.sqrt(300), rel=1e-3)
    assert 1.5e6 < theory.smallest_clients(dim=269_722, noise=noise) < 1.6e6
    assert 1200 < theory.smallest_clients(dim=269_722, noise=noise, trust="secure-sum") < 1300
    with pytest.raises(UsageError, match="no number of clients helps"):
        theory.smallest_clients(dim=10, noise=1.0, R=1.0, grad0=2.0)


def test_the_tracked_bound_with_decay_takes_one_horizon() -> None:
    numbers = {"L": 1.0, "L_max": 1.0, "R": 1.0, "alpha": 1.0, "beta": 0.5, "gamma": 0.01, "F0": 1.0}
    horizons = np.array([10, 20])
    assert theory.forgetting(**numbers, rounds=horizons, decay=0.01, B=2.0).shape == (2,)
    with pytest.raises(UsageError, match="one number of rounds, got 2"):
        theory.forgetting(**numbers, rounds=horizons, decay=0.01, B=2.0, form="tracked")


def test_the_balanced_choice_meets_its_closed_form() -> None:
    L, L_max, F0, B, gamma, rounds, noise = 1.0, 2.0, 3.0, 5.0, 0.01, 1000, 0.1
    found = theory.balanced(L=L, L_max=L_max, F0=F0, B=B, gamma=gamma, rounds=rounds, noise=noise)
    stated = F0 / (gamma * rounds) + (6 * L_max + L / 2) * gamma + 8 * noise * np.sqrt(gamma * L_max * B)
    assert found.bound <= stated <= found.bound * 1.5
    others = [found.decay * factor for factor in (0.3, 3.0)]
    for decay in others:  # the same rule for β, another λ: a larger noise
        assert (decay * B + gamma * L_max) / np.sqrt(decay) > (found.decay * B + gamma * L_max) / np.sqrt(found.decay)


def test_the_noise_of_forgetting_stops_growing_while_theorem_2s_does_not() -> None:
    common = {
        "L": 1.0, "L_max": 1.0, "R": 0.09, "alpha": 0.09, "beta": 0.08, "gamma": 0.02, "F0": 1.0, "sigma": 0.5,
        "dim": 50, "clients": 20,
    }  # fmt: skip
    walk = [theory.theorem2(**common, rounds=k) for k in (10**4, 10**6)]
    rest = [theory.forgetting(**common, rounds=k, decay=0.02, B=1.0) for k in (10**4, 10**6)]
    assert walk[1] > 5 * walk[0]
    assert rest[1] < rest[0] < walk[0] / 5


def test_utility_is_the_limit_of_the_closed_form() -> None:
    L_max, F0, B, S = 2.0, 3.0, 4.0, 1e-4
    travel = (F0 / (np.sqrt(2 * L_max * B) * S)) ** (2 / 3)
    rounds, kappa = 10**12, 1.001
    gamma = travel / rounds
    decay = theory.best_decay(gamma=gamma, L_max=L_max, B=B)
    beta = kappa * 2 * gamma * L_max
    alpha = beta / (1 - decay)
    R = 2 * alpha / (kappa - 1)
    value = theory.forgetting(
        L=1.0, L_max=L_max, R=R, alpha=alpha, beta=beta, gamma=gamma, rounds=rounds, F0=F0, decay=decay, B=B,
        sigma=S * np.sqrt(rounds),
    )  # fmt: skip
    assert value == pytest.approx(theory.utility(L_max=L_max, F0=F0, B=B, S=S), rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.1}, r"beta must be at most \(1 − decay\) alpha = 0.0882, got 0.1"),
        ({"B": 50.0}, "no step size is covered"),
        ({"decay": 1.0}, "decay must be < 1 = 1, got 1"),
        ({"gamma": 0.5}, "gamma must be at most gamma_max"),
        ({"sigma": -1.0}, "sigma must be >= 0"),
    ],
)
def test_what_forgetting_does_not_cover_is_named(change: dict[str, float], message: str) -> None:
    common = {
        "L": 1.0, "L_max": 1.0, "R": 0.09, "alpha": 0.09, "beta": 0.08, "gamma": 0.01, "rounds": 10, "F0": 1.0,
        "decay": 0.02, "B": 1.0,
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        theory.forgetting(**{**common, **change})
