"""Correlated noise against dense matrices: its covariance, the noise in the iterates, and the best coefficients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from normec import UsageError
from normec.privacy.correlated_noise import ONE, BandedNoise, best_coefficients, iterate_noise

WORKLOADS = {
    "prefix sums": lambda rounds: np.ones(rounds),
    "momentum": lambda rounds: np.cumsum(0.9 ** np.arange(rounds)),
    "error feedback": lambda rounds: np.cumsum(np.ones(rounds)),
    "forgetting": lambda rounds: np.cumsum(0.95 ** np.arange(rounds)),
}


def dense(column: np.ndarray, rounds: int) -> np.ndarray:
    """The lower-triangular Toeplitz matrix with this first column."""
    matrix = np.zeros((rounds, rounds))
    for back, value in enumerate(column[:rounds]):
        matrix += value * np.eye(rounds, k=-back)
    return matrix


def error_by_matrices(coefficients: np.ndarray, workload: np.ndarray) -> float:
    rounds = len(workload)
    noise = dense(workload, rounds) @ np.linalg.inv(dense(coefficients, rounds))
    return float((noise**2).sum(1).mean())


def square_root(bands: int) -> np.ndarray:
    """The normalised first coefficients of (1 − x)^{−1/2}, from binomial coefficients."""
    values = np.array([math.comb(2 * i, i) / 4.0**i for i in range(bands)])
    return values / np.linalg.norm(values)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_noise_in_the_iterates_is_that_of_dense_matrices(workload: str) -> None:
    used = WORKLOADS[workload](40)
    coefficients = np.array([0.8, 0.4, -0.2, 0.1])
    found = iterate_noise(coefficients.tolist(), used.tolist())
    assert found == pytest.approx(error_by_matrices(coefficients, used), rel=1e-10)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("rounds", "bands"), [(12, 3), (60, 8), (200, 16)])
def test_the_best_coefficients_beat_independent_noise_and_the_square_root(
    workload: str, rounds: int, bands: int
) -> None:
    used = WORKLOADS[workload](rounds)
    kappa = best_coefficients(bands, used.tolist())
    assert len(kappa) == bands
    assert sum(one * one for one in kappa) <= ONE * ONE
    found = error_by_matrices(np.array(kappa) / ONE, used)
    assert found < 0.7 * error_by_matrices(np.ones(1), used)
    assert found < error_by_matrices(square_root(bands), used)


def test_no_nearby_coefficients_are_better() -> None:
    used = WORKLOADS["prefix sums"](80)
    best = np.array(best_coefficients(6, used.tolist())) / ONE
    least = error_by_matrices(best / np.linalg.norm(best), used)
    draw = np.random.default_rng(0)
    for _ in range(50):
        other = best + 0.02 * draw.standard_normal(6)
        other /= np.linalg.norm(other)
        assert error_by_matrices(other, used) > least * (1 - 1e-6)


def test_the_same_question_has_the_same_answer_and_one_band_is_independent() -> None:
    used = [1.0] * 50
    assert best_coefficients(5, used) == best_coefficients(5, [3.0] * 50) == best_coefficients(5, used)
    assert best_coefficients(1, used) == (ONE,)


def test_more_bands_than_rounds_are_zero_from_there_on() -> None:
    kappa = best_coefficients(9, [1.0] * 4)
    assert kappa[4:] == (0,) * 5
    assert kappa[3] > 0


def test_the_covariance_over_rounds_is_that_of_the_inverse_matrix() -> None:
    rounds, draws, noise = 8, 40_000, BandedNoise([11000, 8000, -5000, 3000])
    generator = torch.Generator().manual_seed(0)
    table, seen = noise.empty_table(draws, torch.float64, torch.device("cpu")), []
    for t in range(rounds):
        row = noise.noise(torch.randn(draws, generator=generator, dtype=torch.float64), table, t)
        noise.keep(table, t, row)
        seen.append(row.numpy())
    inverse = np.linalg.inv(dense(noise.fractions, rounds))
    expected = inverse @ inverse.T
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / draws)
    assert np.abs((np.cov(np.array(seen), bias=True) - expected) / spread).max() < 5


def test_terms_of_integers_are_rounded_down_one_by_one() -> None:
    draw, noise = np.random.default_rng(0), BandedNoise([11000, 8000, -5000, 3000])
    table, past = noise.empty_table(5, torch.int64, torch.device("cpu")), []
    for t in range(9):
        expected = [0] * 5
        for back, kappa in enumerate(noise.coefficients[1:], 1):
            if back <= t:
                expected = [one + kappa * int(two) // ONE for one, two in zip(expected, past[t - back], strict=True)]
        assert noise.of_past(table, t).tolist() == expected
        past.append(draw.integers(-(2**46), 2**46, 5))
        assert noise.of_round(torch.from_numpy(past[t])).tolist() == [11000 * int(one) // ONE for one in past[t]]
        noise.keep(table, t, torch.from_numpy(past[t]))


@pytest.mark.parametrize(
    ("coefficients", "why"),
    [
        ([ONE, ONE // 2], "must have a length of at most 1, got 1 \\+ 0.118"),
        ([0, ONE], "the first coefficient of correlated noise must be > 0, got 0"),
        ([], "bands must be a whole number >= 1, got 0"),
    ],
)
def test_coefficients_that_break_the_rule_are_refused(coefficients: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        BandedNoise(coefficients)


def test_a_workload_without_messages_is_refused() -> None:
    for workload in ([], [0.0, 0.0], [math.inf, 1.0]):
        with pytest.raises(UsageError, match="finite weights of messages in the iterates"):
            best_coefficients(2, workload)
