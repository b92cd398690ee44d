"""Mistakes with the optimizer are refused on every rank or do no harm: no release is unpaid, and no rank hangs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from .torchrun import torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("misuse")
    done = torchrun(2, "-m", "tests.distributed.misuse_job", str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("lr_at_the_start", "the ranks do not agree: lr is [0.1] on rank 0 and [1.1] on rank 1"),
        (
            "lr_of_one_rank_alone",
            "lr is [0.1] on rank 0 and [1.1] on rank 1; every rank must call step() equally often",
        ),
        ("ledger_of_one_rank_alone", "the ranks do not agree: ledger is False on rank 0 and True on rank 1"),
        ("seed_of_one_rank_alone", "the ranks do not agree: seed is None on rank 0 and 0 on rank 1"),
        ("steps_in_another_order", "that of several optimizers in the same order"),
        ("states_of_other_rounds", "round of the state is 0 on rank 0 and 1 on rank 1; load states that were saved"),
        ("states_of_other_attempts", "the ranks do not agree: save of the state is"),
        ("averaged_by_ddp", "the model is wrapped in DistributedDataParallel"),
        ("averaged_by_fsdp", "the model is wrapped in FullyShardedDataParallel"),
    ],
)
def test_a_mistake_is_refused_on_every_rank(found: list[dict[str, Any]], case: str, words: str) -> None:
    for rank in found:
        assert rank[case].startswith("UsageError: ")
        assert words in rank[case]


def test_every_rank_hears_of_a_ledger_that_was_exchanged(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["ledger_that_is_exchanged"].startswith("LedgerDamaged: ")


def test_a_refused_optimizer_leaves_its_ledger_to_the_next(found: list[dict[str, Any]]) -> None:
    for rank in found:
        case = rank["ledger_after_a_refused_optimizer"]
        assert case["refused"].startswith("UsageError: adambc subtracts the variance of the noise")
        assert case["next"] == "nothing"


def test_a_model_that_is_wrapped_after_the_first_step_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        case = rank["averaged_by_ddp_from_the_second_step_on"]
        assert case["first"] == "nothing"
        for words in case["wrapped"]:
            assert words.startswith("UsageError: the model is wrapped in DistributedDataParallel")


def test_no_other_rank_learns_that_a_gradient_is_not_finite(found: list[dict[str, Any]]) -> None:
    first, second = (rank["one_client_has_no_number"] for rank in found)
    assert first["heard"] == [[], [], []]
    assert second["heard"] == [[], ["the gradient of client 1 is not finite in round 1; it sent zero, with noise"], []]
    assert first["x"] == second["x"]
    assert math.isfinite(first["x"])
    assert first["releases"] == second["releases"] == 3


def test_a_frozen_layer_stays_where_rank_0_began(found: list[dict[str, Any]]) -> None:
    first, second = (rank["frozen_layer"] for rank in found)
    assert first["weight"] == second["weight"]
    for rank in (first, second):
        assert rank["moved"] is False, "noise moves what no gradient reaches"
        for late in ("unfrozen", "frozen later"):
            assert "were frozen or unfrozen after the optimizer was created" in rank[late]
        assert rank["releases"] == 1


def test_a_rank_that_steps_once_more_is_told_that_it_is_alone(found: list[dict[str, Any]]) -> None:
    assert found[0]["one_step_more"] == "nothing"
    assert found[1]["one_step_more"].startswith("RankLost: ")
