"""The benchmark of the four hospitals: FLamby's ε, and the page from the record."""

from __future__ import annotations

import json
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from benchmarks.privacy import heart


def test_the_epsilon_of_flamby_without_a_gain_is_a_composition_of_gaussians() -> None:
    """The multiplier that follows from this ε in closed form spends almost ε = 1 in 15 epochs of samples."""
    for patients, batches in ((199, 50), (30, 8)):
        sampled, full = heart.flamby_epsilon(1.0, patients)
        assert 1 < sampled < full
        low, high = 0.1, 20.0
        for _ in range(80):
            z = (low + high) / 2
            mu = math.sqrt(math.ceil(1500 / batches)) / z
            delta = norm.cdf(-full / mu + mu / 2) - math.exp(full) * norm.cdf(-full / mu - mu / 2)
            low, high = (z, high) if delta > heart.DELTA else (low, z)
        planned = PLDAccountant().compose(
            SelfComposedDpEvent(PoissonSampledDpEvent(1 / batches, GaussianDpEvent(z)), 15 * batches)
        )
        assert 0.8 < planned.get_epsilon(heart.DELTA) <= 1  # RDP, by which it was calibrated, is not tight


def test_the_record_is_complete_and_makes_the_page() -> None:
    record = json.loads(heart.RECORD.read_text(encoding="utf-8"))
    held = {(one["scaling"], one["trust"], one["epsilon"], one["method"]): one for one in record["conditions"]}
    assert len(held) == len(heart.CONDITIONS) + len(heart.OTHERS) == len(record["conditions"])
    for at in heart.CONDITIONS:
        one = held[at.scaling, at.trust, at.epsilon, at.method]
        assert len(one["runs"]) >= 20
        assert all(run["epsilon"] <= at.epsilon for run in one["runs"])
        assert one["score"] == max(tried["score"] for tried in one["tried"])
        assert [tried["settings"] for tried in one["tried"]] == heart.candidates(at.method)
    assert heart.PAGE.read_text(encoding="utf-8") == heart.page(record)


@pytest.mark.slow
def test_a_condition_is_measured_again() -> None:
    record = json.loads(heart.RECORD.read_text(encoding="utf-8"))
    one = next(one for one in record["conditions"] if one["epsilon"] == 1.0)
    settings = heart.Condition(*(one[name] for name in ("scaling", "trust", "epsilon", "method"))).settings
    found = heart.accuracy({**settings, **one["chosen"]}, heart.TEST_SEEDS[0])
    assert found["over_hospitals"] == pytest.approx(one["runs"][0]["over_hospitals"], abs=0.02)
