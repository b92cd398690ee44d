"""Cells run, are recorded, stop when the time is up, and go on to the same numbers; records travel and are checked."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.privacy.studies import STUDIES
from normec.errors import UsageError
from normec.experiments import config, runs
from normec.experiments.grid import Cell
from normec.experiments.sweep import Event, run_cells
from publications.alpha_normec.figures.protocol import Protocol
from publications.alpha_normec.replay import plan, records, running
from publications.alpha_normec.replay.collect import collect
from publications.alpha_normec.replay.running import Where

WILD = {"model": "mlp", "lr": 1e30, "precision": "float32"}
PAIR = ["tables-normec-beta-0.1-seed-42", "private-total-norm-normec-sn-beta-0.1-lr-0.1-seed-42"]


def test_a_cell_leaves_a_record_of_its_run(smoke: Protocol, where: Where) -> None:
    heard: list[str] = []
    assert running.run(smoke, PAIR, where, jobs=1, report=lambda cell, _: heard.append(cell.name))
    assert heard == PAIR
    found = records.read(where.cells, plan.plan(smoke))
    for name in PAIR:
        (folder,) = (path for path in (where.runs / "cells").iterdir() if name in path.name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tested = [row for row in rows if "accuracy" in row]
        record, summary = found[name], runs.read(folder).summary
        assert record["curve"]["epoch"] == [row["round"] // 4 for row in tested]
        assert record["curve"]["test"] == [round(100 * row["accuracy"], 2) for row in tested]
        assert record["final"]["held_out"] == round(100 * rows[-1]["validation_accuracy"], 2)
        assert record["best"]["test"] == max(record["curve"]["test"])
        assert record["command"] == f"normec replay run {name}"
        assert record["versions"]["torch"] == summary["versions"]["torch"]
        assert record["seconds"] > 0
        assert record["together"] == 1
    assert found[PAIR[0]]["privacy"] is None
    assert found[PAIR[1]]["privacy"]["epsilon"] == summary["privacy"]["epsilon"] > 100
    assert found[PAIR[1]]["curve"]["epoch"][-1] == 3  # half of six
    # What has a record is not run again, even where its run is gone.
    assert running.run(smoke, PAIR, Where(where.runs / "none", where.folder), jobs=1)
    assert not (where.runs / "none").exists()


def test_no_time_begins_nothing(smoke: Protocol, where: Where) -> None:
    assert not running.run(smoke, PAIR, where, jobs=1, limit_seconds=0.0)
    assert not where.runs.exists()
    assert len(running.waiting(smoke, PAIR, where)) == 2


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_when_the_time_is_up_the_running_cell_is_saved_and_goes_on(
    smoke: Protocol, where: Where, tmp_path: Path
) -> None:
    base, name, clock = smoke, PAIR[0], Clock()

    def hear(event: Event) -> None:
        if event.round > 0:
            clock.now = 11.0

    assert not running.run(base, [name], where, jobs=1, limit_seconds=10.0, on_event=hear, clock=clock)
    (folder,) = (where.runs / "cells").iterdir()
    assert runs.read(folder).summary["status"] == "interrupted"
    assert 0 < runs.read(folder).summary["round"] < 24
    assert records.read(where.cells, plan.plan(base)) == {}
    assert running.run(base, [name], where, jobs=1)
    other = Where(tmp_path / "alone", tmp_path / "alone-records")
    assert running.run(base, [name], other, jobs=1)
    (ours,), (alone,) = (list(records.read(one.cells, plan.plan(base)).values()) for one in (where, other))
    assert ours["curve"] == alone["curve"]
    assert ours["final"] == alone["final"]


def test_a_cell_that_diverges_has_a_record_without_a_final_accuracy(smoke: Protocol, where: Where) -> None:
    cell = plan.plan(smoke)[0]
    wild = replace(cell, config=config.make({**cell.config.model_dump(exclude_none=True), **WILD}))
    (outcome,) = run_cells([Cell(wild.config, {"name": wild.name})], where.runs, jobs=1)
    record = records.made(wild, outcome, smoke)
    assert record["status"] == "diverged"
    assert record["final"]["test"] is None
    records.write(where.cells, record)
    assert records.parse((where.cells / f"{wild.name}.json").read_text(), "it", {wild.name: wild}) == record


def test_a_cell_that_fails_has_no_record(smoke: Protocol, where: Where) -> None:
    wild = {cell.name: cell for cell in plan.plan(smoke)}[PAIR[0]]
    folder = where.runs / "cells" / f"name-{wild.name}-{wild.config.digest()}"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    heard: list[Any] = []
    assert running.run(smoke, PAIR[:1], where, jobs=1, report=lambda _, what: heard.append(what))
    assert heard[0].status == "failed"
    assert "is not a run" in heard[0].error
    assert records.read(where.cells, plan.plan(smoke)) == {}


@pytest.fixture
def filled(paper: Protocol, make: Any, tmp_path: Path) -> Path:
    """A folder of three made records of the paper's own plan, as another machine would leave it."""
    for cell in plan.plan(paper)[:3]:
        records.write(tmp_path / "other" / "cells", make(cell, 10.0, 80.0))
    (tmp_path / "other" / "runs" / "summary.json").parent.mkdir()
    (tmp_path / "other" / "runs" / "summary.json").write_text("{}")  # passed by
    return tmp_path / "other"


def packed(folder: Path) -> Path:
    with tarfile.open(folder.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(folder, "replay")
    return folder.with_suffix(".tgz")


@pytest.mark.parametrize("form", ["folder", "tgz"])
def test_records_are_collected_once(form: str, paper: Protocol, filled: Path, where: Where) -> None:
    source, cells = packed(filled) if form == "tgz" else filled, plan.plan(paper)
    assert sorted(collect(source, where.folder, cells)) == sorted(cell.name for cell in cells[:3])
    assert len(records.read(where.cells, cells)) == 3
    for path in (filled / "cells").iterdir():
        assert (where.cells / path.name).read_text() == path.read_text()
    assert collect(source, where.folder, cells) == []


def test_a_record_of_another_configuration_refuses_the_lot(paper: Protocol, filled: Path, where: Where) -> None:
    cells = plan.plan(paper)
    path = filled / "cells" / f"{cells[1].name}.json"
    record = json.loads(path.read_text())
    record["config"]["beta"] = 0.2
    records.write(filled / "cells", record)
    with pytest.raises(UsageError, match=r"beta is 0\.2 there, 0\.1 in the plan"):
        collect(packed(filled), where.folder, cells)
    assert not where.folder.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "no record of the replay"),
        ('{"name": "tables"}', "it has no 'part'"),
    ],
)
def test_what_is_no_record_is_refused(text: str, says: str, paper: Protocol, filled: Path, where: Where) -> None:
    (filled / "cells" / "other.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        collect(filled, where.folder, plan.plan(paper))
    assert not where.folder.exists()


def test_other_numbers_are_not_taken_unasked(paper: Protocol, filled: Path, where: Where, make: Any) -> None:
    cells = plan.plan(paper)
    collect(filled, where.folder, cells)
    records.write(filled / "cells", make(cells[0], 10.0, 81.0))
    with pytest.raises(UsageError, match="already, with other numbers"):
        collect(filled, where.folder, cells)
    assert collect(filled, where.folder, cells, replace=True) == [cells[0].name]
    assert records.read(where.cells, cells)[cells[0].name]["final"]["test"] == 81.0


def test_lines_of_studies_are_merged(paper: Protocol, filled: Path, where: Where) -> None:
    study = STUDIES["a9a-100"]
    lines = [
        {
            **study.asked(place),
            "chosen": study.effort.settings(place.method)[0],
            "accuracies": [0.8] * 3,
            "accuracy": 0.8,
        }
        for place in study.cells()[:2]
    ]
    (filled / "a9a-100.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[::-1]))
    assert "a9a-100/iid/8/NormEC" in collect(filled, where.folder, plan.plan(paper))
    held = (where.folder / "honest" / "a9a-100.jsonl").read_text().splitlines()
    assert list(map(json.loads, held)) == lines
    lines[0]["clients"] = 7
    (filled / "a9a-100.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(UsageError, match="clients is 7 in the record"):
        collect(filled, where.folder, plan.plan(paper))


@pytest.mark.parametrize("source", ["nothing.tgz", "text.tgz", "empty"])
def test_a_source_without_records_is_refused(source: str, tmp_path: Path, paper: Protocol) -> None:
    (tmp_path / "text.tgz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        collect(tmp_path / source, tmp_path / "replay", plan.plan(paper))
    assert not (tmp_path / "replay").exists()
