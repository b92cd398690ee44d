"""The formulas behind the guide on correlated noise, by dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.correlated_noise import noise_by_formula, trained
from normec import DPSGD, Clip
from normec.experiments import build
from normec.privacy import gaussian
from normec.privacy.correlated_noise import ONE, best_coefficients
from normec.settings import make


@pytest.mark.slow
def test_noise_relative_to_full_participation() -> None:
    rounds, groups, epsilon = 24, 4, 3.0
    found = noise_by_formula(DPSGD(Clip(1.0)), rounds, groups, epsilon)
    sums = np.tril(np.ones((rounds, rounds)))
    kappa = best_coefficients(groups, [1.0] * rounds)
    correlated = sum(one / ONE * np.eye(rounds, k=-back) for back, one in enumerate(kappa))
    shrinks = np.linalg.norm(sums @ np.linalg.inv(correlated)) / np.linalg.norm(sums)
    assert found["everyone"] == 1
    assert found["turns"] == pytest.approx(math.sqrt(groups), rel=1e-9)
    assert found["correlated"] == pytest.approx(math.sqrt(groups) * shrinks, rel=1e-9)
    unamplified = groups * math.sqrt(rounds) / gaussian.mu_for(epsilon, 1e-5)
    assert 1 < found["poisson"] < unamplified


def test_ways_differ_in_who_takes_part_and_in_the_noise_alone() -> None:
    problem = build.problem(make({"data": "digits", "clients": 8, "records": 64, "seed": 0}))
    runs = {
        way: trained(problem, DPSGD(Clip(1.0)), way, rounds=4, groups=2, epsilon=8.0, lr=0.1, seed=0)
        for way in ("everyone", "turns", "correlated")
    }
    spent = {way: run.privacy for way, run in runs.items()}
    assert all(one is not None and one.epsilon == pytest.approx(8.0, rel=1e-6) for one in spent.values())
    assert {way: run.state.messages for way, run in runs.items()} == {"everyone": 32, "turns": 16, "correlated": 16}
    sigmas = {way: one.sigma for way, one in spent.items() if one is not None}
    assert sigmas["turns"] == sigmas["correlated"] == pytest.approx(sigmas["everyone"] / math.sqrt(2), rel=1e-6)
    assert list(runs["correlated"].state.noise) == ["history"]
