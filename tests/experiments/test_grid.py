"""A grid file becomes exactly the runs it says, or one line about what is wrong with it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.experiments import grid
from normec.settings import make

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep-digits.toml"
PLAIN: dict[str, Any] = {"private": False, "rounds": 5}


def test_every_combination_once_in_the_order_of_the_file() -> None:
    found = grid.expand({**PLAIN, "seeds": 2, "grid": {"beta": [0.1, 0.2, 0.3], "lr": [1.0, 2.0]}})
    asked = [(c.config.beta, c.config.lr, c.config.seed) for c in found.cells]
    assert asked == list(itertools.product([0.1, 0.2, 0.3], [1.0, 2.0], [0, 1]))
    assert all(c.config == make({**PLAIN, **c.settings}) for c in found.cells)


def test_cases_meet_the_grid_and_may_have_one_of_their_own() -> None:
    cases = [{"method": "normec", "grid": {"beta": [0.1, 0.2]}}, {"method": "clip21", "tau": 0.3, "rounds": 7}]
    found = grid.expand({**PLAIN, "cases": cases, "grid": {"lr": [1.0, 2.0]}, "seeds": [4]})
    asked = [(c.config.method, c.config.beta, c.config.tau, c.config.lr, c.config.rounds) for c in found.cells]
    assert asked == [
        ("normec", 0.1, None, 1.0, 5),
        ("normec", 0.1, None, 2.0, 5),
        ("normec", 0.2, None, 1.0, 5),
        ("normec", 0.2, None, 2.0, 5),
        ("clip21", None, 0.3, 1.0, 7),
        ("clip21", None, 0.3, 2.0, 7),
    ]
    assert {c.config.seed for c in found.cells} == {4}


@pytest.mark.parametrize("data", ["patients.csv", "patients.csv.gz", "patients.parquet", "libsvm:patients.txt"])
def test_cells_may_have_a_file_of_the_users_own(data: str) -> None:
    found = grid.expand({"private": False, "data": data, "grid": {"lr": [1.0, 2.0]}})
    assert [cell.config.data for cell in found.cells] == [data, data]


def test_seeds_alone_are_a_grid() -> None:
    assert [c.config.seed for c in grid.expand({"seeds": 3}).cells] == [0, 1, 2]
    assert [c.config.seed for c in grid.expand({"grid": {"seed": [5, 3]}}).cells] == [5, 3]


def test_a_cell_keeps_its_digest_when_the_grid_grows() -> None:
    small = grid.expand({**PLAIN, "grid": {"lr": [1.0]}})
    large = grid.expand({**PLAIN, "grid": {"lr": [1.0, 2.0], "beta": [0.1, 0.2]}, "seeds": 2})
    shared = grid.expand({**PLAIN, "lr": 1.0, "grid": {"seed": [0, 1]}})
    assert small.cells[0].config.digest() == shared.cells[0].config.digest()
    assert len({cell.name for cell in large.cells}) == 8
    assert small.cells[0].name == f"lr-1-{small.cells[0].config.digest()}"


def test_names_are_good_for_folders() -> None:
    long = "libsvm:/somewhere/" + "far/" * 60 + "away.svm"
    found = grid.expand({"private": False, "grid": {"data": [long, "digits"], "method": ["gd"]}})
    for cell in found.cells:
        assert "/" not in cell.name
        assert len(cell.name) < 200


def test_the_example_is_a_grid() -> None:
    found = grid.load(EXAMPLE)
    assert found.tune == ("lr",)
    assert found.by == "validation_accuracy"
    assert len(found.cells) > 10


def test_the_criterion_that_decides() -> None:
    lr = {"lr": [1.0, 2.0]}
    assert grid.expand({**PLAIN, "grid": lr}).by == "loss"
    assert grid.expand({**PLAIN, "grid": lr, "validation": 0.2}).by == "validation_accuracy"
    reproduction = grid.expand({**PLAIN, "grid": lr, "tune": ["lr"], "by": "accuracy", "tune_on_test": True})
    assert (reproduction.by, reproduction.on_test) == ("accuracy", True)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "the grid is empty"),
    ({"rounds": 5}, "the grid is empty"),
    ({"grid": {}}, "the grid is empty"),
    ({"grid": {"lr": []}}, "lr in grid is an empty list"),
    ({"cases": []}, "cases is an empty list"),
    ({"seeds": []}, "seeds is an empty list"),
    ({"seeds": 0}, "seeds must be a whole number >= 1"),
    ({"seeds": [1, 1]}, "seeds has 1 twice"),
    ({"seeds": [0.5]}, "seeds must be a whole number"),
    ({"seeds": 2, "seed": 1}, "seeds and seed are both given"),
    ({"seeds": 2, "grid": {"seed": [1]}}, "seeds and seed are both given"),
    ({"gird": {"lr": [1.0]}}, "did you mean 'grid'"),
    ({"grid": {"betta": [1.0]}}, "did you mean 'beta'"),
    ({"cases": [{"metod": "gd"}]}, "did you mean 'method'"),
    ({"cases": [{"gird": {"lr": [1.0]}}]}, "did you mean 'grid'"),
    ({"cases": [{"grid": {"bta": [1.0]}}]}, "did you mean 'beta'"),
    ({"sed": 3, "grid": {"lr": [1.0]}}, "did you mean 'seed'"),
    ({"grid": {"lr": 1.0}}, "lr in grid must be a list of values"),
    ({"grid": 3}, "grid must be a table of lists"),
    ({"cases": {"method": "gd"}}, "two brackets"),
    ({"cases": [{"beta": [0.1]}]}, "put several values into grid.beta"),
    ({"grid": {"lr": [1.0, 1]}}, "lr in grid has 1 twice"),
    ({"lr": 1.0, "grid": {"lr": [1.0]}}, "lr occurs in [grid] and in the shared settings"),
    ({"cases": [{"lr": 1.0}], "grid": {"lr": [1.0]}}, "lr occurs in [grid] and in case 1"),
    ({"cases": [{"grid": {"lr": [1.0]}}], "grid": {"lr": [1.0]}}, "lr occurs in [grid] and in the grid of case 1"),
    ({"cases": [{"lr": 1.0, "grid": {"lr": [1.0]}}]}, "lr occurs in the grid of case 1 and in case 1"),
    ({"cases": [{"beta": 0.1}, {"beta": 0.1}]}, "two cells are the same run"),
    ({"grid": {"device": ["cpu", "cuda"]}}, "device decides where a run is computed"),
    ({"grid": {"lr": [1.0, "fast"]}}, "in the cell lr = fast"),
    ({"grid": {"split": ["iid", "lable"]}}, "in the cell split = lable"),
    ({"grid": {"beta": [0.1, -1.0]}}, "beta must be > 0"),
    ({"method": "clip21", "grid": {"beta": [0.1]}}, "beta does not apply to clip21"),
    ({"grid": {"method": ["normec", "normc"]}}, "did you mean 'normec'"),
    ({"grid": {"model": ["softmx"]}}, "did you mean 'softmax'"),
    ({"grid": {"data": ["digit"]}}, "did you mean 'digits'"),
    ({"private": True, "grid": {"method": ["normec", "gd"]}}, "gd sends messages without a bound"),
    ({"epsilon": 3.0, "grid": {"lr": [1.0]}}, "epsilon is for private runs"),
    ({"tune": "lr", "grid": {"lr": [1.0]}}, "tune must be a list"),
    ({"tune": ["beta"], "grid": {"lr": [1.0]}}, "which the grid does not vary"),
    ({"tune": ["seed"], "seeds": 2}, "which the grid does not vary"),
    ({"tune": ["lr"], "grid": {"lr": [1.0]}}, "needs validation data"),
    ({"by": "validation_loss", "grid": {"lr": [1.0]}}, "needs validation data"),
    ({"by": "accuracy", "grid": {"lr": [1.0]}}, "would choose settings on test data"),
    ({"by": "best_accuracy", "grid": {"lr": [1.0]}}, "would choose settings on test data"),
    ({"by": "test_loss", "grid": {"lr": [1.0]}}, "would choose settings on test data"),
    ({"by": "luck", "grid": {"lr": [1.0]}}, "unknown by 'luck'"),
    ({"tune_on_test": 1, "grid": {"lr": [1.0]}}, "must be true or false"),
]


@pytest.mark.parametrize(("tables", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_line(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        grid.expand({"private": False, **tables})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grid_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no grid file"):
        grid.load(tmp_path / "grid.toml")
    (tmp_path / "grid.toml").write_text("[grid\nlr = 1")
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        grid.load(tmp_path / "grid.toml")
