"""From settings to a problem and to what `train` takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from normec import Rotation
from normec.algorithms.catalogue import CATALOGUE
from normec.errors import UsageError
from normec.experiments import build, methods
from normec.problems.client_data import ResidentRecords
from normec.settings import RunConfig, load, make
from normec.settings.assignments import parse_assignment
from normec.system.files import to_toml


def rows(problem: object) -> list[list[int]]:
    records = problem.records  # type: ignore[attr-defined]
    assert isinstance(records, ResidentRecords)
    return [part.tolist() for part in records.rows]


def test_validation_records_belong_to_no_client() -> None:
    problem = build.problem(make({"clients": 7, "validation": 0.2, "seed": 5}))
    trained = {row for part in rows(problem) for row in part}
    assert problem.validation is not None
    assert isinstance(problem.validation, ResidentRecords)
    held_out = set(problem.validation.rows[0].tolist())
    assert len(held_out) == round(0.2 * 1438)
    assert trained.isdisjoint(held_out)
    assert len(trained | held_out) == 1438
    found = problem.evaluate(problem.x0, {})
    assert {"test_loss", "accuracy", "validation_loss", "validation_accuracy"} == set(found)


def test_split_by_a_column_of_the_inputs(tmp_path: Path) -> None:
    path = tmp_path / "shops.svm"
    path.write_text("".join(f"{i % 2} 1:{i % 3} 2:{i}\n" for i in range(60)))
    problem = build.problem(make({"data": f"libsvm:{path}", "split": "column", "column": 0, "model": "logistic"}))
    assert problem.clients == 3
    for client in range(3):
        inputs, _ = problem.records.batch(client, None)
        assert len(inputs[:, 0].unique()) == 1
    with pytest.raises(UsageError, match="column must name one of the 2 inputs"):
        build.problem(make({"data": f"libsvm:{path}", "split": "column", "column": 7}))
    with pytest.raises(UsageError, match="column needs split"):
        build.problem(make({"data": f"libsvm:{path}", "column": 0}))


def test_the_seed_decides_split_and_start() -> None:
    first, same, other = (build.problem(make({"clients": 5, "model": "mlp", "seed": seed})) for seed in (1, 1, 2))
    assert rows(first) == rows(same) != rows(other)
    assert torch.equal(first.x0, same.x0)
    assert not torch.equal(first.x0, other.x0)


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = make({"beta": 0.3, "split": "label", "epochs": 2, "batch_size": 4, "private": False})
    (tmp_path / "c.toml").write_text(to_toml(config.record()))
    assert load(tmp_path / "c.toml") == config
    assert load(tmp_path / "c.toml", {"beta": 1}).beta == 1.0
    assert config.digest() == make({**config.model_dump(exclude_unset=True), "device": "cpu"}).digest()
    assert config.digest() != make({**config.model_dump(exclude_unset=True), "seed": 1}).digest()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("beta=1", 1), ("lr = 0.5", 0.5), ("split=label", "label"), ("private=false", False), ("data='x=y'", "x=y")],
)
def test_assignments(text: str, expected: object) -> None:
    assert parse_assignment(text)[1] == expected


def test_every_method_has_settings_that_build() -> None:
    for name in CATALOGUE:
        for private in (True, False):
            config = make({"method": name, "private": private})
            built = methods.build(config, dim=650)
            size = methods.step_size(config)
            assert math.isfinite(built.bound) or not private or CATALOGUE[name].private is None
            assert isinstance(size, float)
            assert size > 0
    assert methods.build(make({}), 650).decay > 0
    assert methods.build(make({"private": False}), 650).decay == 0
    assert RunConfig().private
    plain, carried = (make({"method": "dpsgd-norm", "momentum": momentum}) for momentum in (None, 0.75))
    assert methods.step_size(carried) == pytest.approx(methods.step_size(plain) / 4)  # as far in all
    assert methods.step_size(carried.model_copy(update={"lr": 0.3})) == 0.3


def test_what_belongs_to_private_runs_is_refused_elsewhere() -> None:
    with pytest.raises(UsageError, match="sigma is for private runs"):
        build.privacy(make({"private": False, "sigma": 1.0}))
    assert build.privacy(make({"private": False})) is None
    claimed = build.privacy(make({"sample_rate": 0.2}))
    assert claimed is not None
    assert claimed.sampling == 0.2
    seen = build.privacy(make({"sample_rate": 0.2, "trust": "local"}))
    assert seen is not None
    assert seen.sampling is None


def test_groups_that_take_turns() -> None:
    turns = make({"groups": 4, "trust": "central", "noise_bands": "best"})
    assert build.training(turns).participation == Rotation(4)
    stated = build.privacy(turns)
    assert stated is not None
    assert (stated.noise_bands, stated.sampling) == ("best", None)
    drawn = build.training(make({"groups": 4, "sample_rate": 0.5, "trust": "central", "noise_bands": 3}))
    assert drawn.participation == Rotation(4, 0.5)
    assert drawn.privacy is not None
    assert (drawn.privacy.noise_bands, drawn.privacy.sampling) == (3, 0.5)
    with pytest.raises(UsageError, match="leave out sample_count"):
        build.training(make({"groups": 4, "sample_count": 2}))
    with pytest.raises(UsageError, match="noise_bands is for private runs"):
        build.training(make({"groups": 4, "noise_bands": 2, "private": False}))
