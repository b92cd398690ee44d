"""The plan has every cell that the paper prints or draws, with its settings, and none twice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normec.errors import UsageError
from publications.alpha_normec import plan
from publications.alpha_normec.figures import catalogue
from publications.alpha_normec.methods import DP_NORMEC, DP_NORMEC_SN, NORMEC_SN
from publications.alpha_normec.plan import Cell
from publications.alpha_normec.protocol import Protocol
from publications.alpha_normec.published import TABLES

pytestmark = pytest.mark.slow  # nothing of the library depends on it


@pytest.fixture(scope="module")
def cells(paper: Protocol) -> tuple[Cell, ...]:
    return plan.plan(paper)


def differences(one: Cell, other: Cell) -> dict[str, Any]:
    ours, theirs = one.config.identity_settings(), other.config.identity_settings()
    return {key: ours.get(key) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}


def test_the_sixteen_accuracies_come_first_and_match_what_is_published(cells: tuple[Cell, ...]) -> None:
    first = cells[:16]
    found = {(cell.method.slug, cell.beta): (cell.lr, cell.paper) for cell in first}
    assert found == {(m, b): (e.lr, e.accuracy) for m, table in TABLES.items() for b, e in table.items()}
    for cell in first:
        config = cell.config
        assert (config.data, config.model, config.clients, config.batch_size) == ("cifar10", "resnet20", 10, 32)
        assert (config.epochs, config.seed, config.validation, config.split) == (300, 42, 0.1, "iid")
        assert (config.evaluate_every, config.log_every) == (5 * 140, 70)  # every fifth epoch
        assert (config.augment, config.precision, config.private) == (True, "bf16", False)
        assert config.alpha == (None if config.method == "clip21" else 0.01)
        assert (config.tau if config.method == "clip21" else config.beta) == cell.beta


def test_two_more_seeds_of_the_eight_cells_at_small_beta(cells: tuple[Cell, ...]) -> None:
    more = [cell for cell in cells[16:] if cell.part == "tables"]
    assert len(more) == 16
    assert {cell.beta for cell in more} == {0.01, 0.1}
    by_name = {cell.name: cell for cell in cells}
    for cell in more:
        assert cell.seed in (43, 44)
        assert differences(cell, by_name[cell.name.replace(f"seed-{cell.seed}", "seed-42")]) == {"seed": cell.seed}


def test_names_are_stable_and_runs_distinct(cells: tuple[Cell, ...]) -> None:
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names)) == len({cell.config.digest() for cell in cells})
    assert names[0] == "tables-normec-beta-0.01-seed-42"
    for name in (
        "tables-dpsgd-norm-beta-10-seed-42",
        "tables-clip21-beta-0.1-seed-44",
        "readings-sn-in-place-normec-sn-beta-0.1-seed-42",
        "private-total-norm-clip21-beta-0.001-lr-0.01-seed-42",
        "private-total-variance-normec-sn-beta-1-lr-0.1-seed-42-long",
        "alpha-normec-sn-beta-10-alpha-0.1-seed-42",
    ):
        assert name in names


def test_a_reading_changes_one_thing(cells: tuple[Cell, ...]) -> None:
    by_name = {cell.name: cell for cell in cells}
    wanted = {
        "sn-by-tensor": {"server_norm": "by-tensor"},
        "sn-in-place": {"server_norm": "in-place"},
        "memory-from-gradient": {"initial_memory": "gradient"},
        "split-dirichlet": {"split": "dirichlet"},
        "split-label": {"split": "label"},
        "tf32": {"precision": "tf32"},
    }
    found: dict[str, int] = {}
    for cell in cells:
        if cell.reading in wanted:
            twin = by_name[cell.name.replace(f"readings-{cell.reading}", "tables")]
            assert differences(cell, twin) == wanted[cell.reading]
            assert cell.paper == twin.paper is not None
            found[cell.reading] = found.get(cell.reading, 0) + 1
    assert set(found) == set(wanted)
    assert found.pop("tf32") == 1  # a question of ours, not of the paper
    assert set(found.values()) <= {2, 3}


def test_the_private_grids(cells: tuple[Cell, ...]) -> None:
    formula = math.sqrt(300 * math.log(1e5)) / 8
    sizes = {"total-norm": formula / math.sqrt(269722), "total-variance": math.sqrt(formula / 269722)}
    for noise, sigma in sizes.items():
        own = [cell for cell in cells if cell.reading == noise and not cell.full_length]
        points = {(cell.method.name, cell.beta, cell.lr) for cell in own}
        assert len(own) == len(points) == 3 * 4 * 3
        for cell in own:
            assert (cell.config.epochs, cell.config.model, cell.config.private) == (150, "resnet20-gn", True)
            bound = cell.beta if cell.config.method == "clip21" else 1.0
            assert cell.config.sigma == pytest.approx(bound * sigma)
            assert cell.paper is None
        long = [cell for cell in cells if cell.reading == noise and cell.full_length]
        assert [differences(cell, half) for cell, half in zip(long, own, strict=True)] == [{"epochs": 300}] * 36
    per_coordinate = [cell for cell in cells if cell.reading == "per-coordinate"]
    assert [cell.config.sigma for cell in per_coordinate] == [pytest.approx(formula)] * 2
    once = [cell for cell in cells if cell.reading == plan.ONCE and cell.method is DP_NORMEC]
    assert [cell.config.sigma for cell in once] == [pytest.approx(sizes["total-norm"] / math.sqrt(140))]


def test_the_heat_map_has_twelve_cells_eight_of_its_own(cells: tuple[Cell, ...]) -> None:
    own = [cell for cell in cells if cell.part == "alpha"]
    tables = [cell for cell in cells[:16] if cell.method is NORMEC_SN]
    points = {(cell.config.alpha, cell.beta, cell.lr) for cell in [*own, *tables]}
    assert len(own) == 8
    assert points == {(a, b, 0.01 if b == 0.01 else 0.1) for a in (0.01, 0.1, 1.0) for b in (0.01, 0.1, 1.0, 10.0)}
    assert {cell.paper for cell in own} == {None}


def test_the_best_of_a_kind_is_run_in_full_length_once_all_have_run(cells: tuple[Cell, ...]) -> None:
    own = [
        cell for cell in cells if cell.reading == "total-norm" and cell.method is DP_NORMEC_SN and not cell.full_length
    ]
    scores = {cell.name: 50.0 + number for number, cell in enumerate(own)}
    best = own[4].name
    scores[best] = 99.0
    last = max((cell for cell in own if cell.beta == 1.0), key=lambda cell: scores[cell.name]).name
    assert plan.best_private_cells(cells, scores) == {f"{best}-long", f"{last}-long"}
    del scores[own[0].name]
    assert plan.best_private_cells(cells, scores) == {f"{last}-long"}
    assert plan.best_private_cells(cells, {}) == set()


def test_parts_and_cells_are_named_and_a_wrong_name_is_refused(cells: tuple[Cell, ...]) -> None:
    assert len(plan.named(cells, [])) == len(cells)
    chosen = plan.named(cells, ["alpha", "tables-normec-beta-1-seed-42"])
    assert len(chosen) == 9
    with pytest.raises(UsageError, match="did you mean 'tables-normec-beta-1-seed-42'"):
        plan.named(cells, ["tables-normec-beta-1-seed-24"])


@pytest.mark.parametrize("scale", ["paper", "smoke"])
def test_figures_are_made_of_cells_of_the_plan(scale: str, request: pytest.FixtureRequest) -> None:
    base = request.getfixturevalue(scale)
    known = {cell.name: cell.config.digest() for cell in plan.plan(base)}
    for cell in catalogue.cells(catalogue.FIGURES, base):
        assert known[cell.name] == cell.config.digest()
