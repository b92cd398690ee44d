"""Cells run as if alone, wherever they run; what breaks is recorded and the others go on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normec.errors import Interrupted, UsageError
from normec.experiments import grid, runs, sweep, tasks
from normec.experiments.sweep import Event, run_cells
from normec.report import page
from normec.training import saved_run

from ..support.forked_workers import from_a_server
from ..support.runs import snapshot
from ..support.waiting import LIMIT

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'normec[ray]'"
)
PLAIN: dict[str, Any] = {"private": False, "clients": 10, "rounds": 20}
DIVERGING: dict[str, Any] = {**PLAIN, "model": "mlp", "method": "gd"}


def cells(**tables: Any) -> tuple[grid.Cell, ...]:
    return grid.expand(tables).cells


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked where torch is imported; those of the other tests start from nothing."""
    monkeypatch.setattr(tasks, "get_context", from_a_server("normec.experiments.tasks"))


def history(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cell_is_the_run_it_would_be_alone(jobs: int, tmp_path: Path, forked: None) -> None:  # noqa: ARG001
    asked = cells(**PLAIN, grid={"beta": [0.1, 0.3, 1.0]})
    outcomes = run_cells(asked, tmp_path / "sweep", jobs=jobs)
    assert [outcome.cell for outcome in outcomes] == list(asked)
    for number, outcome in enumerate(outcomes):
        alone = runs.execute(outcome.cell.config, tmp_path / f"alone-{number}")
        assert outcome.status == "finished"
        assert outcome.folder == tmp_path / "sweep" / "cells" / outcome.cell.name
        assert history(outcome.folder) == history(alone.folder)
        assert outcome.history.rows == alone.history.rows
        assert outcome.summary["final"] == alone.summary["final"]


def test_what_is_done_is_skipped_and_a_grid_may_grow(tmp_path: Path) -> None:
    first = run_cells(cells(**PLAIN, grid={"beta": [0.1, 0.3]}), tmp_path, jobs=1)
    written = [(outcome.folder / "summary.json").stat().st_mtime_ns for outcome in first]
    started: list[str] = []

    def watch(event: Event) -> None:
        if event.outcome is None:
            started.append(event.cell.name)

    grown = run_cells(cells(**PLAIN, grid={"beta": [0.1, 0.3, 1.0]}, seeds=1), tmp_path, jobs=1, on_event=watch)
    assert [outcome.skipped for outcome in grown] == [True, True, False]
    assert [outcome.folder for outcome in grown[:2]] == [outcome.folder for outcome in first]
    assert set(started) == {grown[2].cell.name}
    assert [(outcome.folder / "summary.json").stat().st_mtime_ns for outcome in first] == written
    assert len(list((tmp_path / "cells").iterdir())) == 3


def test_a_run_that_is_asked_for_twice_runs_once(tmp_path: Path, forked: None) -> None:  # noqa: ARG001
    (cell,) = cells(**PLAIN, grid={"beta": [0.1]})
    other = grid.Cell(cell.config, {"panel": "right"})
    outcomes = run_cells([cell, other], tmp_path, jobs=2)
    assert [outcome.cell for outcome in outcomes] == [cell, other]
    assert [outcome.skipped for outcome in outcomes] == [False, True]
    assert outcomes[0].folder == outcomes[1].folder


def test_a_cell_that_diverges_is_recorded_with_its_round_and_not_run_again(tmp_path: Path) -> None:
    asked = cells(**DIVERGING, grid={"lr": [0.1, 1e30, 0.2]})
    outcomes = run_cells(asked, tmp_path, jobs=1)
    assert [outcome.status for outcome in outcomes] == ["finished", "diverged", "finished"]
    summary = json.loads((outcomes[1].folder / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert f"not finite in round {summary['round']}" in (outcomes[1].error or "")
    again = run_cells(asked, tmp_path, jobs=1)
    assert [outcome.skipped for outcome in again] == [True, True, True]
    assert again[1].error == outcomes[1].error


def test_a_cell_whose_first_gradients_are_broken_is_recorded_too(tmp_path: Path) -> None:
    data = tmp_path / "huge.svm"
    data.write_text("".join(f"{i % 2} 1:{3e38 if i == 33 else i} 2:3e38\n" for i in range(40)))
    asked = cells(private=False, clients=2, rounds=3, grid={"data": [f"libsvm:{data}"], "model": ["mlp"]})
    (outcome,) = run_cells(asked, tmp_path / "sweep", jobs=1)
    assert (outcome.status, outcome.summary["round"]) == ("diverged", 0)
    (again,) = run_cells(asked, tmp_path / "sweep", jobs=1)
    assert again.skipped


def test_a_cell_that_cannot_run_fails_alone_and_is_tried_again(tmp_path: Path) -> None:
    data = tmp_path / "late.svm"
    asked = cells(private=False, clients=2, rounds=3, grid={"data": [f"libsvm:{data}", "digits"]})
    outcomes = run_cells(asked, tmp_path / "sweep", jobs=1)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    assert "late.svm" in (outcomes[0].error or "")
    assert saved_run.read(outcomes[0].folder).summary["status"] == "failed"
    data.write_text("".join(f"{i % 2} 1:{i} 2:1\n" for i in range(40)))
    again = run_cells(asked, tmp_path / "sweep", jobs=1)
    assert [(outcome.status, outcome.skipped) for outcome in again] == [("finished", False), ("finished", True)]


OWN = """
import torch
from torch.utils.data import TensorDataset
LABELS = [0, 1, 0, 1, 7777]
def clients():
    return {"clients": [TensorDataset(torch.ones(5, 3), torch.tensor(LABELS)) for _ in range(2)], "classes": 2}
def unreadable():
    raise ValueError(f"the labels are {LABELS}")
"""


def test_the_files_of_a_private_cell_that_fails_quote_no_record(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "odd.svm").write_text("1 1:0.5\n0 1:7777x\n")
    data = [f"{tmp_path}/own.py:clients", f"{tmp_path}/own.py:unreadable", f"libsvm:{tmp_path}/odd.svm"]
    asked = cells(model="softmax", rounds=3, lr=0.1, grid={"data": data})
    outcomes = run_cells(asked, tmp_path / "sweep", jobs=1)
    page.write_sweep(tmp_path / "sweep")
    assert [outcome.status for outcome in outcomes] == ["failed"] * 3
    assert all("7777" in (outcome.error or "") for outcome in outcomes), [outcome.error for outcome in outcomes]
    files = [path for path in (tmp_path / "sweep").rglob("*") if path.is_file()]
    assert [path for path in files if b"7777" in path.read_bytes()] == []
    assert outcomes[1].summary["error"].startswith("ValueError, whose text is left out")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [("summary.json", '{"status": "fini', "summary.json is damaged"), ("chapter.txt", "mine", "is not a run")],
)
def test_a_half_written_or_foreign_folder_is_named_and_left_alone(
    file: str, text: str, says: str, tmp_path: Path
) -> None:
    asked = cells(**PLAIN, grid={"beta": [0.1, 0.3]})
    done = run_cells(asked[:1], tmp_path, jobs=1) if file == "summary.json" else []
    folder = done[0].folder if done else tmp_path / "cells" / asked[0].name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    before = snapshot(folder)
    outcomes = run_cells(asked, tmp_path, jobs=1)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    assert says in (outcomes[0].error or "")
    assert snapshot(folder) == before


def test_a_folder_that_a_kill_left_half_written_is_taken_up(tmp_path: Path) -> None:
    (cell,) = cells(**PLAIN, grid={"beta": [0.1]})
    folder = tmp_path / "cells" / cell.name
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / ".config.toml.123.part").write_text("data = ")
    (outcome,) = run_cells([cell], tmp_path, jobs=1)
    assert outcome.status == "finished"
    assert not list(folder.glob(".*.part"))


# Read by every worker as it starts: the first of them that flushes its fortieth file to the disk dies.
DYING = """
import os, signal
flush, done = os.fsync, 0

def counted(file):
    global done
    done += 1
    if done == 40 and not os.path.exists(os.environ["DIED"]):
        open(os.environ["DIED"], "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return flush(file)

os.fsync = counted
"""


@pytest.mark.slow
def test_a_killed_worker_takes_only_its_cell_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(DYING)
    source = str(Path(runs.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "start"), source]))
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    asked = cells(**{**PLAIN, "checkpoint_seconds": 0.0}, grid={"beta": [0.1, 0.3]}, seeds=2)
    outcomes = run_cells(asked, tmp_path, jobs=2, together=2)
    assert sorted(outcome.status for outcome in outcomes) == ["failed", "finished", "finished", "finished"]
    (lost,) = (outcome for outcome in outcomes if outcome.status == "failed")
    assert "SIGKILL" in (lost.error or "")
    again = run_cells(asked, tmp_path, jobs=1)
    assert all(outcome.status == "finished" for outcome in again)
    assert sum(outcome.skipped for outcome in again) == 3
    alone = runs.execute(lost.cell.config, tmp_path / "alone")
    assert history(lost.folder) == history(alone.folder)


@pytest.mark.parametrize(
    "how",
    [
        {"jobs": 1},
        pytest.param({"jobs": 2}, marks=pytest.mark.slow),
        pytest.param({"jobs": 2, "ray": "local"}, marks=[NEEDS_RAY, pytest.mark.slow]),
    ],
)
def test_ctrl_c_is_honoured_after_the_round(how: dict[str, Any], tmp_path: Path, forked: None) -> None:  # noqa: ARG001
    asked = cells(**{**PLAIN, "rounds": 10**8}, grid={"beta": [0.1, 0.3, 1.0]})
    sent: list[str] = []

    def watch(event: Event) -> None:
        if not sent and event.round > 5:
            sent.append(event.cell.name)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_cells(asked, tmp_path, on_event=watch, **how)
    standing = {cell.name: state for cell, (_, state) in zip(asked, sweep.cell_states(asked, tmp_path), strict=True)}
    assert standing[sent[0]] == "interrupted"
    assert standing[asked[2].name] == "waiting"
    assert (tmp_path / "cells" / sent[0] / "checkpoint" / "latest.json").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
from normec.experiments import grid, sweep

asked = grid.expand({"private": False, "clients": 10, "rounds": 5, "grid": {"beta": [0.1, 0.3, 1.0]}}).cells
limits = resource.getrlimit(resource.RLIMIT_FSIZE)

def fill(event):  # once a cell is done, no file can grow any more
    if event.outcome is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

try:
    sweep.run_cells(asked, Path("sweep"), jobs=1, on_event=fill)
except OSError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print(message)
print([outcome.skipped for outcome in sweep.run_cells(asked, Path("sweep"), jobs=1)])
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_the_sweep_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    message, again = done.stdout.splitlines()
    assert message.startswith("cannot write ")
    assert "what is done is kept" in message
    assert again == "[True, False, False]"


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    asked = cells(**PLAIN, grid={"beta": [0.1]})
    with pytest.raises(UsageError, match="cannot write to"):
        run_cells(asked, Path("/proc/sweep"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        run_cells(asked, tmp_path / "file")
    with pytest.raises(UsageError, match="jobs must be a whole number >= 1"):
        run_cells(asked, tmp_path / "sweep", jobs=0)


def test_two_sweeps_cannot_share_a_folder(tmp_path: Path) -> None:
    asked = cells(**PLAIN, grid={"beta": [0.1]})
    said = []

    def watch(_: Event) -> None:
        if not said:
            with pytest.raises(UsageError) as caught:
                run_cells(asked, tmp_path)
            said.append(str(caught.value))

    run_cells(asked, tmp_path, jobs=1, on_event=watch)
    assert "another process" in said[0]


@NEEDS_RAY
def test_the_same_on_a_ray_cluster(tmp_path: Path) -> None:
    asked = cells(**DIVERGING, grid={"lr": [0.1, 1e30, 0.2]})
    heard: list[Event] = []
    outcomes = run_cells(asked, tmp_path / "ray", ray="local", on_event=heard.append)
    assert [outcome.status for outcome in outcomes] == ["finished", "diverged", "finished"]
    assert {event.cell.name for event in heard if event.outcome is None} == {cell.name for cell in asked}
    here = run_cells(asked, tmp_path / "here", jobs=1)
    for there, one in zip(outcomes, here, strict=True):
        assert history(there.folder) == history(one.folder)
        assert (there.status, there.error) == (one.status, one.error)
    assert all(outcome.skipped for outcome in run_cells(asked, tmp_path / "ray", ray="local"))


@NEEDS_RAY
def test_a_ray_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no Ray cluster at '127\.0\.0\.1:1'"):
        run_cells(cells(**PLAIN, seeds=1), tmp_path, ray="127.0.0.1:1")
