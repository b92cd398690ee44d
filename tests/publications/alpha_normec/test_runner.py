"""Cells run, are recorded, stop at the time limit and continue to the same numbers; records are collected."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.experiments.grid import Cell
from normec.experiments.sweep import Event, run_cells
from normec.settings import make
from normec.training import saved_run
from publications.alpha_normec import plan, records, runner
from publications.alpha_normec.protocol import Protocol
from publications.alpha_normec.records import collect
from publications.alpha_normec.runner import Folders

pytestmark = pytest.mark.slow  # nothing of the library depends on it

WILD = {"model": "mlp", "lr": 1e30, "precision": "float32"}
PAIR = ["tables-normec-beta-0.1-seed-42", "private-total-norm-normec-sn-beta-0.1-lr-0.1-seed-42"]


def test_a_cell_leaves_a_record_of_its_run(smoke: Protocol, folders: Folders) -> None:
    ended: list[str] = []
    assert runner.run(smoke, PAIR, folders, jobs=1, report=lambda cell, _: ended.append(cell.name))
    assert ended == PAIR
    found = records.read(folders.results, plan.plan(smoke))
    for name in PAIR:
        (folder,) = (path for path in (folders.runs / "cells").iterdir() if name in path.name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tested = [row for row in rows if "accuracy" in row]
        record, summary = found[name], saved_run.read(folder).summary
        assert record["curve"]["epoch"] == [row["round"] // 4 for row in tested]
        assert record["curve"]["test"] == [round(100 * row["accuracy"], 2) for row in tested]
        assert record["final"]["held_out"] == round(100 * rows[-1]["validation_accuracy"], 2)
        assert record["best"]["test"] == max(record["curve"]["test"])
        assert record["command"] == f"python -m publications.alpha_normec run {name}"
        assert record["versions"]["torch"] == summary["versions"]["torch"]
        assert record["seconds"] > 0
        assert record["together"] == 1
    assert found[PAIR[0]]["privacy"] is None
    assert found[PAIR[1]]["privacy"]["epsilon"] == summary["privacy"]["epsilon"] > 100
    assert found[PAIR[1]]["curve"]["epoch"][-1] == 3  # half of six
    # What has a record is not run again, even where its run is gone.
    assert runner.run(smoke, PAIR, Folders(folders.runs / "none", folders.results), jobs=1)
    assert not (folders.runs / "none").exists()


def test_without_time_nothing_starts(smoke: Protocol, folders: Folders) -> None:
    assert not runner.run(smoke, PAIR, folders, jobs=1, limit_seconds=0.0)
    assert not folders.runs.exists()
    assert len(runner.pending(smoke, PAIR, folders)) == 2


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_at_the_time_limit_the_running_cell_is_saved_and_continues_later(
    smoke: Protocol, folders: Folders, tmp_path: Path
) -> None:
    base, name, clock = smoke, PAIR[0], Clock()

    def on_event(event: Event) -> None:
        if event.round > 0:
            clock.now = 11.0

    assert not runner.run(base, [name], folders, jobs=1, limit_seconds=10.0, on_event=on_event, clock=clock)
    (folder,) = (folders.runs / "cells").iterdir()
    assert saved_run.read(folder).summary["status"] == "interrupted"
    assert 0 < saved_run.read(folder).summary["round"] < 24
    assert records.read(folders.results, plan.plan(base)) == {}
    assert runner.run(base, [name], folders, jobs=1)
    other = Folders(tmp_path / "alone", tmp_path / "alone-records")
    assert runner.run(base, [name], other, jobs=1)
    (ours,), (alone,) = (list(records.read(one.results, plan.plan(base)).values()) for one in (folders, other))
    assert ours["curve"] == alone["curve"]
    assert ours["final"] == alone["final"]


def test_a_cell_that_diverges_has_a_record_without_a_final_accuracy(smoke: Protocol, folders: Folders) -> None:
    cell = plan.plan(smoke)[0]
    wild = replace(cell, config=make({**cell.config.model_dump(exclude_none=True), **WILD}))
    (outcome,) = run_cells([Cell(wild.config, {"name": wild.name})], folders.runs, jobs=1)
    record = records.make(wild, outcome, smoke)
    assert record["status"] == "diverged"
    assert record["final"]["test"] is None
    records.write(folders.results, record)
    assert (
        records.parse((folders.results / records.FOLDER / f"{wild.name}.json").read_text(), "it", {wild.name: wild})
        == record
    )


def test_a_cell_that_fails_has_no_record(smoke: Protocol, folders: Folders) -> None:
    wild = {cell.name: cell for cell in plan.plan(smoke)}[PAIR[0]]
    folder = folders.runs / "cells" / f"name-{wild.name}-{wild.config.digest()}"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    ended: list[Any] = []
    assert runner.run(smoke, PAIR[:1], folders, jobs=1, report=lambda _, what: ended.append(what))
    assert ended[0].status == "failed"
    assert "is not a run" in ended[0].error
    assert records.read(folders.results, plan.plan(smoke)) == {}


@pytest.fixture
def filled(paper: Protocol, make: Any, tmp_path: Path) -> Path:
    """A folder of three made records of the paper's own plan, as another machine would leave it."""
    for cell in plan.plan(paper)[:3]:
        records.write(tmp_path / "other", make(cell, 10.0, 80.0))
    (tmp_path / "other" / "runs" / "summary.json").parent.mkdir()
    (tmp_path / "other" / "runs" / "summary.json").write_text("{}")  # passed by
    return tmp_path / "other"


def packed(folder: Path) -> Path:
    with tarfile.open(folder.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(folder, "results")
    return folder.with_suffix(".tgz")


@pytest.mark.parametrize("form", ["folder", "tgz"])
def test_records_are_collected_once(form: str, paper: Protocol, filled: Path, folders: Folders) -> None:
    source, cells = packed(filled) if form == "tgz" else filled, plan.plan(paper)
    assert sorted(collect(source, folders.results, cells)) == sorted(cell.name for cell in cells[:3])
    assert len(records.read(folders.results, cells)) == 3
    for path in (filled / records.FOLDER).iterdir():
        assert (folders.results / records.FOLDER / path.name).read_text() == path.read_text()
    assert collect(source, folders.results, cells) == []


def test_a_record_of_another_configuration_refuses_all(paper: Protocol, filled: Path, folders: Folders) -> None:
    cells = plan.plan(paper)
    path = filled / records.FOLDER / f"{cells[1].name}.json"
    record = json.loads(path.read_text())
    record["config"]["beta"] = 0.2
    records.write(filled, record)
    with pytest.raises(UsageError, match=r"beta is 0\.2 there, 0\.1 in the plan"):
        collect(packed(filled), folders.results, cells)
    assert not folders.results.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "no record of a cell"),
        ('{"name": "tables"}', "it has no 'part'"),
    ],
)
def test_what_is_no_record_is_refused(text: str, says: str, paper: Protocol, filled: Path, folders: Folders) -> None:
    (filled / records.FOLDER / "other.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        collect(filled, folders.results, plan.plan(paper))
    assert not folders.results.exists()
    with pytest.raises(UsageError, match=says):
        records.read(filled, plan.plan(paper), skip_others=True)


def test_records_of_other_plans_are_skipped_on_request(paper: Protocol, filled: Path) -> None:
    cells = plan.plan(paper)
    path = filled / records.FOLDER / f"{cells[1].name}.json"
    other = json.loads(path.read_text())
    other["config"]["beta"] = 0.2
    records.write(filled, other)
    records.write(filled, {**other, "name": "unknown"})
    assert list(records.read(filled, cells, skip_others=True)) == [cells[0].name, cells[2].name]


def test_other_numbers_are_not_taken_unasked(paper: Protocol, filled: Path, folders: Folders, make: Any) -> None:
    cells = plan.plan(paper)
    collect(filled, folders.results, cells)
    records.write(filled, make(cells[0], 10.0, 81.0))
    with pytest.raises(UsageError, match="already with other numbers"):
        collect(filled, folders.results, cells)
    assert collect(filled, folders.results, cells, replace=True) == [cells[0].name]
    assert records.read(folders.results, cells)[cells[0].name]["final"]["test"] == 81.0


@pytest.mark.parametrize("source", ["nothing.tgz", "text.tgz", "empty"])
def test_a_source_without_records_is_refused(source: str, tmp_path: Path, paper: Protocol) -> None:
    (tmp_path / "text.tgz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        collect(tmp_path / source, tmp_path / "results", plan.plan(paper))
    assert not (tmp_path / "results").exists()
