"""The audit comes near the claim of a true mechanism, and catches planted bugs. All mechanisms in plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from normec.errors import UsageError
from normec.privacy import audit, audit_scores, gaussian
from normec.privacy.audit import clopper_pearson_epsilon, gaussian_mu

ROUNDS, SIGMA, DELTA = 8, 2.0, 1e-5
MU = math.sqrt(ROUNDS) / SIGMA
CLAIM = gaussian.epsilon(MU, DELTA)
SIGNS = np.array([1.0, -1.0] * (ROUNDS // 2))


def projections(rng: np.random.Generator, present: bool, trials: int, bug: str = "") -> np.ndarray:
    """[trials, ROUNDS]: each round's message (d = 16) along the canary's direction, whose sign alternates."""
    dimension = 16
    noise = rng.standard_normal((trials, ROUNDS, dimension)) * SIGMA
    if bug == "scaled by beta":
        noise *= 0.1
    elif bug == "total norm":
        noise /= math.sqrt(dimension)
    elif bug == "forgotten round":
        noise[:, 5] = 0
    elif bug == "reused":
        noise[:, 3] = noise[:, 2]
    message = np.zeros((ROUNDS, dimension))
    if present:
        message[:, 0] = SIGNS
    return (message + noise)[:, :, 0]


def run_both(bug: str = "", trials: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return projections(rng, True, trials, bug), projections(rng, False, trials, bug)


def test_it_comes_near_the_claim_of_a_gaussian_mechanism() -> None:
    inside, outside = run_both()
    found = audit_scores(inside @ SIGNS, outside @ SIGNS, DELTA, 0.999, CLAIM)
    assert not found.violated
    assert found.gaussian > 0.85 * CLAIM
    assert found.clopper_pearson > 0.25 * CLAIM
    assert "not refuted" in str(found)


def test_it_finds_the_best_combination_of_rounds_by_itself() -> None:
    found = audit_scores(*run_both(), DELTA, 0.999, CLAIM)
    assert 0.8 * CLAIM < found.epsilon <= CLAIM


@pytest.mark.parametrize("bug", ["scaled by beta", "total norm", "forgotten round", "reused"])
def test_planted_bugs_are_caught(bug: str) -> None:
    found = audit_scores(*run_both(bug), DELTA, 0.999, CLAIM)
    assert found.violated
    assert "REFUTED" in str(found)


def test_true_mechanisms_are_not_accused() -> None:
    """60 audits at 95 %: 3 accusations are expected at most; 13 or more have probability 7e-6."""
    claims = [audit_scores(*run_both(trials=300, seed=s), DELTA, 0.95, CLAIM).violated for s in range(60)]
    assert sum(claims) <= 12


@pytest.mark.slow
def test_no_false_alarm_without_any_leak() -> None:
    rng = np.random.default_rng(0)
    bounds = [audit_scores(rng.standard_normal(200), rng.standard_normal(200), DELTA, 0.95).mu for _ in range(200)]
    assert sum(bound > 0 for bound in bounds) <= 15


def test_clopper_pearson_against_randomised_response() -> None:
    """A mechanism that is exactly ln 3-DP: the bound approaches it and stays under it."""
    rng = np.random.default_rng(0)
    n = 100_000
    inside, outside = (rng.random(n) < 0.75).astype(float), (rng.random(n) < 0.25).astype(float)
    assert 0.95 * math.log(3) < clopper_pearson_epsilon(inside, outside, 1e-6, 0.999) <= math.log(3)


def test_the_limits_are_those_of_scipy() -> None:
    inside, outside = np.r_[np.ones(300), np.zeros(100)], np.r_[np.ones(40), np.zeros(360)]
    rng = np.random.default_rng(0)
    rng.shuffle(inside), rng.shuffle(outside)
    p = stats.binomtest(int(inside[200:].sum()), 200).proportion_ci(0.98).low  # 1 % each side
    q = stats.binomtest(int(outside[200:].sum()), 200).proportion_ci(0.98).high
    assert clopper_pearson_epsilon(inside, outside, 1e-3, 0.98) == pytest.approx(math.log((p - 1e-3) / q))


def test_the_gaussian_bound_covers() -> None:
    rng = np.random.default_rng(1)
    over = sum(gaussian_mu(rng.standard_normal(100) + 1.5, rng.standard_normal(100), 0.9) > 1.5 for _ in range(400))
    assert over <= 40


def test_scores_that_are_not_gaussian_can_be_audited_without_that_assumption() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.random(4000) < 0.1
    found = audit_scores(rng.standard_normal(4000) + 6 * drawn, rng.standard_normal(4000), DELTA, gaussian_scores=False)
    assert found.mu == 0
    assert found.gaussian == 0
    assert found.clopper_pearson > 1


def test_scores_without_noise_are_infinitely_telling() -> None:
    assert gaussian_mu(np.ones(20), np.zeros(20), 0.99) == math.inf
    assert gaussian_mu(np.ones(20), np.ones(20), 0.99) == 0.0
    assert audit_scores(np.ones(20), np.zeros(20), DELTA, 0.99, claim=1.0).violated


def test_the_driver_runs_both_ways_with_fresh_trials() -> None:
    seen = []

    def run(present: bool, trial: int) -> float:
        seen.append((present, trial))
        return float(np.random.default_rng(trial).normal() + 3 * present)

    found = audit(run, 500, DELTA, 0.999, claim=gaussian.epsilon(3.0, DELTA))
    assert len({trial for _, trial in seen}) == 1000
    assert not found.violated
    assert found.mu > 2.5


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (np.full(50, np.nan), np.zeros(50)),
        (np.zeros(50), np.full(50, np.inf)),
        (np.zeros(3), np.zeros(50)),
        (np.zeros((2, 2, 20)), np.zeros(50)),
    ],
)
def test_nonsense_is_refused(inside: np.ndarray, outside: np.ndarray) -> None:
    with pytest.raises(UsageError):
        audit_scores(inside, outside, DELTA)
