"""The setting `diagnostics`: which runs get another digest by it, and which choices need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.experiments import compare, grid, runs
from normec.settings import make
from normec.training.callbacks import Callback

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "rounds": 4}


def test_the_setting_names_only_private_runs_that_ask_for_it() -> None:
    """Digests of older runs hold, and so do the records of publications, which are known by `identity_settings`."""
    plain, asked = make(SMALL), make({**SMALL, "diagnostics": True})
    assert plain.digest() != asked.digest()
    assert plain.identity_settings() == asked.identity_settings()
    assert "diagnostics" not in plain.identity_settings()
    public = [make({**SMALL, "private": False, "diagnostics": asked}) for asked in (False, True)]
    assert public[0].digest() == public[1].digest()


def test_a_folder_keeps_to_what_it_was_begun_with(tmp_path: Path) -> None:
    runs.execute(make(SMALL), tmp_path / "run")
    with pytest.raises(UsageError, match="diagnostics is False there, True here"):
        runs.execute(make({**SMALL, "diagnostics": True}), tmp_path / "run")


@pytest.mark.parametrize("by", ["loss", "grad_norm", "smallest_grad_norm", "memory_error"])
def test_step_sizes_of_private_runs_are_not_chosen_by_what_is_not_recorded(by: str, tmp_path: Path) -> None:
    entries = compare.candidates(["normec"], SMALL, [0.05, 0.5])
    with pytest.raises(UsageError, match=f"private runs do not record {by}"):
        compare.run(entries, tmp_path / "out", lambda _: Callback(), by)
    assert not (tmp_path / "out").exists()  # before anything ran


def test_one_step_size_needs_no_choice(tmp_path: Path) -> None:
    (outcome,) = compare.run(compare.candidates(["normec"], SMALL), tmp_path, lambda _: Callback())
    assert outcome.best is not None
    assert compare.row(outcome)["loss"] is None


def test_asked_for_a_comparison_chooses_by_the_loss(tmp_path: Path) -> None:
    entries = compare.candidates(["normec"], {**SMALL, "diagnostics": True}, [0.05, 0.5])
    (outcome,) = compare.run(entries, tmp_path, lambda _: Callback())
    assert outcome.best is not None
    assert outcome.best.summary["final"]["loss"] == min(value for value in outcome.tried.values() if value is not None)


@pytest.mark.parametrize("how", [{"by": "loss"}, {"by": "grad_norm", "tune": ["lr"]}])
def test_a_sweep_that_tunes_by_it_must_ask(how: dict[str, Any]) -> None:
    tables: dict[str, Any] = {**SMALL, "grid": {"lr": [0.05, 0.5]}, **how}
    with pytest.raises(UsageError, match="set diagnostics = true"):
        grid.expand(tables)
    for cure in ({"diagnostics": True}, {"private": False}):
        assert grid.expand({**tables, **cure}).by == how["by"]
    assert len(grid.expand({**SMALL, "grid": {"lr": [0.05, 0.5]}}).cells) == 2  # decides nothing
