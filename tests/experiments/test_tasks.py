"""Runs that take turns end as they would alone; what a shared problem depends on."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from normec.experiments import build, runs, tasks
from normec.settings import RunConfig, make
from normec.training import saved_run
from normec.training.interleaved import run_interleaved


def counting(end: int, fails_at: int | None = None) -> Generator[None, None, int]:
    for step in range(end):
        if step == fails_at:
            raise ValueError(f"step {step}")
        yield
    return end


def test_all_are_taken_to_their_ends_and_one_that_fails_stops_no_other() -> None:
    found = run_interleaved([counting(3), counting(7, fails_at=2), counting(5), counting(0)], torch.device("cpu"))
    assert [found[0], found[2], found[3]] == [3, 5, 0]
    assert isinstance(found[1], ValueError)
    assert str(found[1]) == "step 2"


@pytest.mark.slow
def test_cells_in_turns_leave_what_they_leave_alone(tmp_path: Path) -> None:
    shared = {"model": "mlp", "clients": 5, "rounds": 12, "batch_size": 8, "private": False}
    configs = [make({**shared, "lr": lr, "method": method}) for method in ("normec", "gd") for lr in (0.1, 0.5)]
    configs.append(make({**shared, "lr": 1e30, "method": "gd"}))  # diverges
    given = [tasks.Task(i, of, tmp_path / f"turns-{i}") for i, of in enumerate(configs)]
    heard: list[tasks.Progress] = []
    tasks._run_in_turns(given, torch.device("cpu"), heard.append, lambda: False)
    endings = {progress.index: progress.ending for progress in heard if progress.ending is not None}
    assert {index: ending.status for index, ending in endings.items() if ending} == {
        **dict.fromkeys(range(4), "finished"),
        4: "diverged",
    }
    for i, of in enumerate(configs[:4]):
        alone = runs.execute(of, tmp_path / f"alone-{i}")
        assert saved_run.read(given[i].folder).history.rows == alone.history.rows


def test_code_of_the_user_s_own_does_not_run_in_turns() -> None:
    """Runs in turns share their data and have streams of their own, so it could write to the same memory for both."""
    assert not tasks.names_own_code(make({"method": "normec", "model": "mlp"}))
    own = {"data": "mine.py:DATA"}, {"model": "mine.py:Model"}, {"method": "mine.py:Method"}, {"method": "installed"}
    for settings in own:
        assert tasks.names_own_code(RunConfig.model_construct(None, **settings))


def test_cells_in_turns_stop_when_asked_and_go_on_later(tmp_path: Path) -> None:
    of = make({"clients": 5, "rounds": 50, "private": False, "lr": 0.1})
    task = tasks.Task(0, of, tmp_path / "run")
    heard: list[tasks.Progress] = []
    asked = iter([False] * 10 + [True] * 10)
    tasks._run_in_turns([task], torch.device("cpu"), heard.append, lambda: next(asked))
    assert heard[-1].ending is not None
    assert heard[-1].ending.status == "interrupted"
    assert heard[-1].ending.round == 10
    assert runs.execute(of, task.folder).history.rows == runs.execute(of, tmp_path / "alone").history.rows


class Watched:
    """A configuration that notes which of its settings are read."""

    def __init__(self, of: RunConfig) -> None:
        self.of, self.read = of, set[str]()

    def __getattr__(self, name: str) -> object:
        self.read.add(name)
        return getattr(self.of, name)


@pytest.mark.parametrize(
    "settings",
    [
        {"data": "digits"},
        {"data": "digits", "split": "dirichlet", "validation": 0.1, "model": "mlp", "penalty": 0.1},
        {"data": "digits", "split": "column", "column": 3, "records": 500, "test_records": 50},
    ],
)
def test_a_problem_depends_on_no_other_setting(settings: dict[str, object]) -> None:
    watched = Watched(make(settings))
    build.problem(watched)  # type: ignore[arg-type]
    assert watched.read - {"public_seed"} <= set(build.PROBLEM_SETTINGS)  # which is the seed, or 0
    assert build.problem_key(make({**settings, "lr": 0.5})) == build.problem_key(make(settings))
    assert build.problem_key(make({**settings, "seed": 5})) != build.problem_key(make(settings))
