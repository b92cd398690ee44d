"""The benchmark of the four hospitals: FLamby's ε, and the page from the record."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from benchmarks.privacy import heart
from normec.experiments import build
from normec.settings import make


@pytest.mark.slow
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
    record = heart.read()
    held = {(one["scaling"], one["trust"], one["epsilon"], one["method"]): one for one in record["conditions"]}
    assert len(held) == len(heart.CONDITIONS) + len(heart.OTHERS) == len(record["conditions"])
    for at in heart.CONDITIONS:
        one = held[at.scaling, at.trust, at.epsilon, at.method]
        assert len(one["runs"]) >= 20
        assert all(run["epsilon"] <= at.epsilon for run in one["runs"])
        assert one["score"] == max(tried["score"] for tried in one["tried"])
        assert [tried["settings"] for tried in one["tried"]] == heart.candidates(at.method)
    assert heart.PAGE.read_text(encoding="utf-8") == heart.page(record)


def test_the_page_shows_every_method(tmp_path: Path) -> None:
    """Their results are those of the record; without all of them there is no page."""
    record, lines = heart.read(), heart.RECORD.read_text(encoding="utf-8").splitlines()
    text = heart.page(record)
    for method in heart.OTHER_METHODS:
        shown = re.search(rf"\| `{method}` \| (.*?) ± .*? \| (.*?) ± .*? \|", text)
        assert shown is not None
        for trust, value in zip(("local", "secure-sum"), shown.groups(), strict=True):
            (one,) = (
                one
                for one in record["conditions"]
                if heart.condition_of(one) == heart.Condition("public", trust, 1.0, method)
            )
            mean = sum(run["over_hospitals"] for run in one["runs"]) / len(one["runs"])
            assert float(value) == pytest.approx(100 * mean, abs=0.051)
    for count, written in ((len(lines), True), (len(heart.CONDITIONS), False)):
        (tmp_path / heart.RECORD.name).write_text("".join(f"{line}\n" for line in lines[:count]))
        assert (heart.write_page(tmp_path, tmp_path / f"{count}.md") is not None) == written
    assert (tmp_path / f"{len(lines)}.md").read_text(encoding="utf-8") == text


def test_the_numbers_of_patients_are_those_of_the_data() -> None:
    problem = build.problem(make(heart.SHARED))
    assert tuple(problem.records.sizes.tolist()) == heart.PATIENTS
    assert problem.test is not None
    assert sum(heart.TEST_PATIENTS) == int(problem.test.sizes.sum())


@pytest.mark.slow
def test_a_condition_is_measured_again() -> None:
    record = heart.read()
    one = next(one for one in record["conditions"] if one["epsilon"] == 1.0)
    settings = heart.Condition(*(one[name] for name in ("scaling", "trust", "epsilon", "method"))).settings
    found = heart.accuracy({**settings, **one["chosen"]}, heart.TEST_SEEDS[0])
    assert found["over_hospitals"] == pytest.approx(one["runs"][0]["over_hospitals"], abs=0.02)
