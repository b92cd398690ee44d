"""Theorem 1, its induction and Corollary 1, on random instances."""

from __future__ import annotations

import numpy as np
import pytest

from normec import theory
from normec.errors import UsageError

from . import instances


@pytest.mark.parametrize("overshooting", [False, True])
def test_theorem_1_holds_on_a_thousand_instances_each_side_of_alpha(overshooting: bool) -> None:
    m, rounds = 1000, 60
    rng = np.random.default_rng(int(overshooting))
    problem = instances.random(m, 3, 4, seed=int(overshooting))
    constants = problem.constants
    alpha = 10 ** rng.uniform(-2, 0.5, m)
    R = 10 ** rng.uniform(-1.5, 1, m)
    beta = alpha + R * rng.uniform(0.01, 0.99, m) if overshooting else alpha * rng.uniform(0.05, 1, m)
    limit = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=constants["L_max"])
    gamma = limit * np.where(rng.random(m) < 0.5, 1, rng.uniform(0.05, 1, m))
    norms, before, after = instances.normec(
        problem, alpha, beta, gamma, instances.start_memory(problem, R, rng), rounds
    )
    common = {**constants, "R": R, "alpha": alpha, "beta": beta, "gamma": gamma, "rounds": rounds}
    paper = theory.theorem1(**common)
    sharper = theory.theorem1(**common, form="sharper")
    tracked = theory.theorem1(**common, form="tracked")
    assert (norms.mean(1) <= tracked * (1 + 1e-9)).all()  # the proofs bound the mean, hence the smallest
    assert (tracked <= sharper * (1 + 1e-9)).all()
    assert (sharper <= paper * (1 + 1e-9)).all()
    kept = theory.invariant(R=R, alpha=alpha, beta=beta, gamma=gamma, L_max=constants["L_max"])
    assert (before.max(1) <= kept * (1 + 1e-9)).all()
    assert (after.max(1) <= theory.W(R=R, alpha=alpha, beta=beta) * (1 + 1e-9)).all()
    if not overshooting:
        assert np.allclose(kept, R)
    errors = theory.memory_errors(R0=R, alpha=alpha, beta=beta, drift=gamma * constants["L_max"], rounds=rounds)
    assert (after <= errors * (1 + 1e-9)).all()
    mean = theory.mean_error(R0=R, alpha=alpha, beta=beta, drift=gamma * constants["L_max"], rounds=rounds)
    assert np.allclose(mean, errors.mean(1))


def test_the_induction_lemma_fails_for_beta_above_alpha() -> None:
    """Two clients ½x² from x⁰ = 10, errors 0.09 and 1: after one round the first is 1.80 > R = 1."""
    alpha, beta, R = 0.01, 1.0, 1.0
    gamma = theory.gamma_max(beta=beta, R=R, alpha=alpha, L_max=1.0)
    assert gamma == pytest.approx(1 / 1.01)
    problem = instances.Many(np.ones((1, 2, 1)), np.zeros((1, 2, 1)), np.array([[10.0]]))
    memory = np.array([[[10 - 0.09], [10 - 1.0]]])
    _, before, after = instances.normec(problem, alpha, beta, gamma, memory, 2)
    assert before[0, 0] == pytest.approx(R)
    assert after[0, 0] == pytest.approx(0.81)
    assert before[0, 1] == pytest.approx(0.81 + 1 / 1.01)
    assert before[0, 1] > 1.79
    kept = theory.invariant(R=R, alpha=alpha, beta=beta, gamma=gamma, L_max=1.0)
    assert kept == pytest.approx(before[0, 1])
    assert theory.W(R=R, alpha=alpha, beta=beta) == pytest.approx(0.81)


def test_the_supremum_after_an_update_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        alpha, beta, r, decay = (
            10 ** rng.uniform(-2, 1),
            10 ** rng.uniform(-2, 1),
            10 ** rng.uniform(-2, 1),
            rng.choice([0, 0.3]),
        )
        grid = np.linspace(0, r, 20_001)
        brute = (np.abs(1 - decay - beta / (alpha + grid)) * grid).max()
        assert theory.error_after_update(r, alpha, beta, decay) == pytest.approx(brute, rel=1e-5, abs=1e-9)


@pytest.mark.slow
def test_corollary_1_has_slope_one_half_and_holds() -> None:
    problem = instances.random(50, 3, 4, seed=5)
    alpha, beta, D, horizons = 2.0, 1.5, 3.0, (100, 1000, 10_000)
    bounds, measured = [], []
    for rounds in horizons:
        rng = np.random.default_rng(rounds)
        R = np.full(50, D / rounds**0.5)
        gamma = theory.corollary1_gamma(L_max=problem.constants["L_max"], D=D, alpha=alpha, beta=beta, rounds=rounds)
        norms, _, _ = instances.normec(problem, alpha, beta, gamma, instances.start_memory(problem, R, rng), rounds)
        bound = theory.corollary1(**problem.constants, D=D, alpha=alpha, beta=beta, rounds=rounds)
        assert (norms.min(1) <= bound).all()
        bounds.append(bound.mean())
        measured.append(np.median(norms.mean(1)))
    assert np.polyfit(np.log(horizons), np.log(bounds), 1)[0] == pytest.approx(-0.5, abs=1e-6)
    assert np.polyfit(np.log(horizons), np.log(measured), 1)[0] == pytest.approx(-0.5, abs=0.1)


@pytest.mark.slow
def test_corollary_1_is_false_for_a_smaller_step() -> None:
    """The statement allows γ ≤ …; with γ → 0 nothing moves and the start's gradient stays above C/√(K+1)."""
    problem = instances.Many(np.ones((1, 1, 1)), np.zeros((1, 1, 1)), np.array([[1.0]]))
    alpha, beta, D, rounds = 4.0, 3.9, 1.0, 10_000
    bound = theory.corollary1(**problem.constants, D=D, alpha=alpha, beta=beta, rounds=rounds)
    gamma = theory.corollary1_gamma(L_max=1.0, D=D, alpha=alpha, beta=beta, rounds=rounds)
    memory = np.array([[[1 - D / 100]]])
    small, _, _ = instances.normec(problem, alpha, beta, 1e-3 * gamma, memory, rounds)
    right, _, _ = instances.normec(problem, alpha, beta, gamma, memory, rounds)
    assert small.min() > 0.9 > 0.05 > bound[0] > right.min()


def test_the_optimal_beta_needs_a_large_distance() -> None:
    rng = np.random.default_rng(1)
    m = 2000
    L, F0, D, alpha = (10 ** rng.uniform(-1, 1, m) for _ in range(4))
    alpha, D = alpha * 30, D * 30
    L_max = L * rng.uniform(1, 3, m)
    feasible = theory.optimal_beta_is_feasible(L=L, L_max=L_max, D=D, alpha=alpha, F0=F0)
    assert 100 < feasible.sum() < 1900
    assert (D[feasible] > (L_max * np.sqrt(2 * F0 / L))[feasible]).all()
    assert (feasible == (theory.smallest_D(L=L, L_max=L_max, alpha=alpha, F0=F0) < D)).all()
    s = feasible
    beta = theory.optimal_beta(L=L, L_max=L_max, D=D, alpha=alpha, F0=F0)
    value = theory.corollary1(L=L[s], L_max=L_max[s], D=D[s], alpha=alpha[s], beta=beta[s], rounds=1, F0=F0[s])
    assert np.allclose(value, np.sqrt(2 * L * F0)[s] + 2 * D[s])
    assert (value >= 3 * np.sqrt(2 * L * F0)[s]).all()


def test_the_best_start_error_is_the_best() -> None:
    common = {"L_max": 3.0, "alpha": 0.5, "beta": 0.4, "rounds": 50, "F0": 2.0}
    best = theory.best_R(**common)

    def value(R: float) -> float:
        return 2.0 / (theory.gamma_max(beta=0.4, R=R, alpha=0.5, L_max=3.0) * 50) + 2 * R

    assert value(best) <= min(value(0.99 * best), value(1.01 * best))


def test_warm_up_reaches_its_goal_and_rests_where_it_must() -> None:
    rounds = theory.warmup_rounds(5.0, 0.1, alpha=0.2, beta=0.15)
    r = 5.0
    for _ in range(rounds):
        r = abs(1 - 0.15 / (0.2 + r)) * r
    assert r <= 0.1
    assert rounds == pytest.approx((5 - 0.1) / 0.15 + 0.2 / 0.15 * np.log(50), rel=0.1)
    assert theory.resting_error(0.1, 1.0) == pytest.approx(0.4)
    r = 3.0
    for _ in range(500):
        r = abs(1 - 1.0 / (0.1 + r)) * r
    assert r == pytest.approx(0.4)
    with pytest.raises(UsageError, match=r"no warm-up reaches R = 0\.01"):
        theory.warmup_rounds(5.0, 0.01, alpha=0.1, beta=1.0)


GOOD = {"L": 1.0, "L_max": 1.0, "R": 0.1, "alpha": 0.1, "beta": 0.1, "gamma": 0.05, "rounds": 10, "F0": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.3}, r"beta must be < alpha \+ R = 0.2, got 0.3"),
        ({"gamma": 0.06}, r"gamma must be at most gamma_max = .* = 0.05, got 0.06"),
        ({"alpha": -1.0}, "alpha must be > 0 and finite, got -1"),
        ({"L": float("nan")}, "L must be > 0 and finite, got nan"),
        ({"F0": -1.0}, "F0 must be >= 0 and finite, got -1"),
        ({"rounds": 0}, "rounds must be whole, >= 1, got 0"),
        ({"rounds": 1.5}, "rounds must be whole, >= 1, got 1.5"),
        ({"form": "papr"}, "unknown form 'papr', did you mean 'paper'"),
        ({"beta": np.array([0.1, 0.5, 0.1])}, "got 0.5"),
    ],
)
def test_what_a_theorem_does_not_cover_is_named_in_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        theory.theorem1(**{**GOOD, **change})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_floats_in_floats_out_arrays_in_arrays_out() -> None:
    assert isinstance(theory.theorem1(**GOOD), float)  # type: ignore[arg-type]
    many = theory.theorem1(**{**GOOD, "rounds": np.array([10, 20, 40])}, form="tracked")  # type: ignore[arg-type]
    alone = [theory.theorem1(**{**GOOD, "rounds": k}, form="tracked") for k in (10, 20, 40)]  # type: ignore[arg-type]
    assert many.tolist() == pytest.approx(alone)
