"""Audits of releases: planted bugs are refuted, true mechanisms are not. All mechanisms in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from normec.errors import UsageError
from normec.privacy import View, audit_releases, gaussian

ROUNDS, DIMENSION, DELTA = 4, 8, 1e-5
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])
UNIT = np.random.default_rng(7).standard_normal(DIMENSION)
UNIT /= np.linalg.norm(UNIT)
MESSAGES = SIGNS[:, None] * UNIT  # what the canary sends, of length 1

Noise = Callable[[np.random.Generator, int, float], np.ndarray]  # (generator, runs, σ) → [runs, ROUNDS, DIMENSION]


def true_noise(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return rng.standard_normal((runs, ROUNDS, DIMENSION)) * sigma


def view_of(noise: Noise, epsilon: float, runs: int = 1000, seed: int = 0, sent: np.ndarray = MESSAGES) -> View:
    """A release a round, noise for ε by the closed form; `sent` is what the canary really sends."""
    sigma = math.sqrt(ROUNDS) / gaussian.mu_for(epsilon, DELTA)
    rng = np.random.default_rng(seed)
    inside, outside = sent + noise(rng, runs, sigma), noise(rng, runs, sigma)
    return View("the sum", inside, outside, MESSAGES, np.zeros_like(MESSAGES), epsilon)


def one_coordinate_only(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, :, 1:] = 0
    return noise


def one_number_for_all_coordinates(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return np.repeat(true_noise(rng, runs, sigma)[:, :, :1], DIMENSION, axis=2)


def less_in_the_last_coordinate(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, :, -1] *= 0.05
    return noise


def a_direction_without_noise(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    free = np.random.default_rng(3).standard_normal(DIMENSION)
    free /= np.linalg.norm(free)
    return noise - (noise @ free)[:, :, None] * free


def scaled_by_beta(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return 0.1 * true_noise(rng, runs, sigma)


def total_norm(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return true_noise(rng, runs, sigma) / math.sqrt(DIMENSION)


def forgotten_in_one_round(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, 2] = 0
    return noise


def used_in_two_rounds(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, 1] = noise[:, 0]
    return noise


def used_again_with_the_other_sign(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, 2] = -noise[:, 1]
    return noise


def used_again_in_another_order(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[:, 3] = noise[:, 0, ::-1]
    return noise


def one_sided(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return np.abs(true_noise(rng, runs, sigma))


def one_sided_of_full_variance(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return (np.abs(true_noise(rng, runs, 1.0)) - math.sqrt(2 / math.pi)) * sigma / math.sqrt(1 - 2 / math.pi)


def truncated(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return stats.truncnorm.rvs(-2, 2, scale=sigma, size=(runs, ROUNDS, DIMENSION), random_state=rng)


def uniform(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return rng.uniform(-1, 1, (runs, ROUNDS, DIMENSION)) * sigma * math.sqrt(3)


def half_precision(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return true_noise(rng, runs, sigma).astype(np.float16).astype(np.float64)


def coarse_grid(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    return np.round(true_noise(rng, runs, sigma) / (0.01 * sigma)) * (0.01 * sigma)


def few_seeds(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    table = true_noise(np.random.default_rng(0), 256, sigma)
    return table[rng.integers(256, size=runs)]


def none_at_all(_: np.random.Generator, runs: int, __: float) -> np.ndarray:
    return np.zeros((runs, ROUNDS, DIMENSION))


def missing_now_and_then(rng: np.random.Generator, runs: int, sigma: float) -> np.ndarray:
    noise = true_noise(rng, runs, sigma)
    noise[rng.random(runs) < 0.3] = 0
    return noise


BUGS: list[tuple[Noise, int]] = [
    (one_coordinate_only, 8),
    (one_number_for_all_coordinates, 8),
    (less_in_the_last_coordinate, 8),
    (a_direction_without_noise, 8),
    (scaled_by_beta, 8),
    (total_norm, 8),
    (forgotten_in_one_round, 8),
    (used_in_two_rounds, 8),
    (used_again_with_the_other_sign, 8),
    (used_again_in_another_order, 8),
    (one_sided, 1),
    (one_sided_of_full_variance, 1),
    (truncated, 1),  # rare events: more runs
    (uniform, 1),
    (half_precision, 1),
    (coarse_grid, 1),
    (few_seeds, 1),
    (none_at_all, 8),
    (missing_now_and_then, 1),
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("bug", "epsilon"), BUGS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_planted_bugs_are_refuted(bug: Noise, epsilon: float) -> None:
    found = audit_releases([view_of(bug, epsilon, runs=4000 if bug is truncated else 1000)], DELTA)
    assert found.violated, found


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("epsilon", "part"), [(0.5, 0.1), (2.0, 0.7), (8.0, 0.85), (30.0, 0.9)])
def test_the_bound_comes_near_the_claim_of_a_true_mechanism(epsilon: float, part: float) -> None:
    found = audit_releases([view_of(true_noise, epsilon, runs=10_000)], DELTA)
    assert not found.violated
    assert found.epsilon > part * epsilon


@pytest.mark.slow
def test_true_mechanisms_are_accused_no_more_often_than_stated() -> None:
    """120 audits at 90 %: 12 accusations are expected at most; 27 or more have probability 5e-5."""
    claims = [audit_releases([view_of(true_noise, 4, runs=150, seed=s)], DELTA, 0.9).violated for s in range(120)]
    assert sum(claims) <= 26


def test_a_message_past_its_bound_is_refuted() -> None:
    long = MESSAGES.copy()
    long[1] *= 3
    assert audit_releases([view_of(true_noise, 8, sent=long)], DELTA).violated


def test_a_message_in_another_direction_is_seen_too() -> None:
    """The canary's influence is learned, not only expected: here all of it is where nobody expects it."""
    other = np.random.default_rng(1).standard_normal(DIMENSION)
    other -= (other @ UNIT) * UNIT
    sent = MESSAGES + 2 * other / np.linalg.norm(other)
    assert audit_releases([view_of(true_noise, 8, sent=sent)], DELTA).violated


def test_noise_that_depends_on_the_canary_is_refuted() -> None:
    true, silent = view_of(true_noise, 1), view_of(scaled_by_beta, 1)
    view = View("the sum", true.inside, silent.outside, MESSAGES, np.zeros_like(MESSAGES), 1.0)
    assert audit_releases([view], DELTA).violated


def test_noise_shared_by_two_clients_is_refuted() -> None:
    """The releases of a round are two clients'; the second one's noise uncovers the first."""
    rng, sigma = np.random.default_rng(0), math.sqrt(ROUNDS) / gaussian.mu_for(8, DELTA)
    sent = np.concatenate([MESSAGES, np.zeros_like(MESSAGES)])

    def both(shared: bool) -> np.ndarray:
        noise = true_noise(rng, 1000, sigma)
        return np.concatenate([noise, noise if shared else true_noise(rng, 1000, sigma)], axis=1)

    for shared in (True, False):
        view = View("messages", sent + both(shared), both(shared), sent, np.zeros_like(sent), 8.0)
        assert audit_releases([view], DELTA).violated == shared


def test_the_view_that_looks_worst_is_judged() -> None:
    good, bad = view_of(true_noise, 8), view_of(total_norm, 8, seed=1)
    found = audit_releases([good, replace(bad, name="elsewhere"), good], DELTA)
    assert found.violated
    assert found.score.startswith("elsewhere")
    assert not audit_releases([good, good], DELTA).violated


def test_each_view_is_held_against_its_own_claim() -> None:
    view = view_of(true_noise, 8)
    assert audit_releases([replace(view, name="stricter", claim=2.0), view], DELTA).violated


def test_bounds_for_another_claim_are_not_reported() -> None:
    """The first view is refuted by rare events alone, the second looks worst to the Gaussian bound."""
    uneven = View("uneven", *list(vars(view_of(one_sided_of_full_variance, 1)).values())[1:])
    found = audit_releases([uneven, view_of(true_noise, 8)], DELTA)
    assert found.violated
    assert found.claim == 1
    assert found.clopper_pearson > 1
    assert (found.gaussian, found.mu) == (0, 0)


def test_nothing_that_is_judged_was_used_to_learn() -> None:
    """A score that fits the first half perfectly and the second not at all proves nothing."""
    view = view_of(lambda rng, runs, _: true_noise(rng, runs, 1e3), 8)
    view.inside[: len(view.inside) // 2] += 1e4
    found = audit_releases([view], DELTA)
    assert not found.violated


@pytest.mark.parametrize("shape", [(20, 4, 8), (100, 8)])
def test_nonsense_is_refused(shape: tuple[int, ...]) -> None:
    view = view_of(true_noise, 8)
    with pytest.raises(UsageError, match="audit of releases needs"):
        audit_releases([View("x", np.zeros(shape), view.outside, MESSAGES, MESSAGES, 8.0)], DELTA)
    with pytest.raises(UsageError, match="views must be"):
        audit_releases([], DELTA)
    broken = np.full_like(view.inside, np.nan)
    with pytest.raises(UsageError, match="finite"):
        audit_releases([View("x", broken, view.outside, MESSAGES, MESSAGES, 8.0)], DELTA)
