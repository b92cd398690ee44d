"""`normec sweep` and `normec results` in real processes: killed, interrupted, asked for nonsense."""

from __future__ import annotations

import csv
import json
import random
import signal
import time
from pathlib import Path

import pytest

from normec.cli.app import run
from normec.cli.sweep_progress import SweepProgress, duration
from normec.experiments import grid, runs
from normec.experiments.sweep import Event, Outcome, run_cells

from ..support.forks import Fork
from ..support.runs import snapshot
from ..support.waiting import alive, wait_for

ENDLESS = 10**8  # rounds
GRID = """
private = false
clients = 10
validation = 0.2
rounds = {rounds}
checkpoint_seconds = {checkpoints}
seeds = 2
tune = ["lr"]

[grid]
lr = [0.05, 0.5]
beta = [0.1, 0.3]
"""


def write(folder: Path, rounds: int, checkpoints: float = 30.0) -> None:
    (folder / "grid.toml").write_text(GRID.format(rounds=rounds, checkpoints=checkpoints))


def numbers(cell: Path) -> dict[str, bytes]:
    """What must not depend on how often a sweep was killed: iterates, memory and history of a cell."""
    return {name: data for name, data in snapshot(cell).items() if name.endswith((".safetensors", ".jsonl", ".toml"))}


def finished(cells: Path) -> dict[str, int]:
    """The cells that are done, and when they said so."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in cells.glob("*/summary.json")
        if json.loads(path.read_text())["status"] == "finished"
    }


def workers(pid: int) -> list[int]:
    """The processes that a sweep has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_after_a_cell(folder: Path, cells: Path, done: set[str], later: float) -> None:
    """Start the sweep and kill it when it has done one more cell; its workers end too."""
    process = Fork(["-m", "normec", "sweep", "grid.toml", "--out", "killed", "--jobs", "2", "--quiet"], folder)
    wait_for(lambda: finished(cells).keys() - done, "another cell's end", lambda: goes_on(process))
    time.sleep(later)  # spreads the kills over a cell; nothing depends on it
    helpers = workers(process.pid)
    process.kill()
    process.communicate()
    assert helpers
    wait_for(lambda: not any(map(alive, helpers)), "the end of the workers")


def goes_on(process: Fork) -> None:
    assert process.poll() is None, process.communicate()[1]


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_loses_no_cell_and_runs_none_twice(tmp_path: Path) -> None:
    """Behind the eight cells stand others that never end, so that the sweep cannot end before it is killed."""
    write(tmp_path, rounds=60, checkpoints=0.0)
    asked = grid.load(tmp_path / "grid.toml").cells
    text = (tmp_path / "grid.toml").read_text()
    endless = text.replace("rounds = 60\n", "").replace("[grid]", f"[grid]\nrounds = [60, {ENDLESS}]")
    (tmp_path / "grid.toml").write_text(endless)
    chance = random.Random(3)
    cells = tmp_path / "killed" / "cells"
    done: dict[str, int] = {}
    for _ in range(3):
        kill_after_a_cell(tmp_path, cells, set(done), chance.uniform(0, 0.3))
        now = finished(cells)
        assert {name: now.get(name) for name in done} == done, "a cell that was done was run again"
        done = now
    last = run_cells(asked, tmp_path / "killed", jobs=1)
    assert [outcome.status for outcome in last] == ["finished"] * 8
    assert {outcome.folder.name for outcome in last if outcome.skipped} == done.keys()
    assert {name: finished(cells)[name] for name in done} == done
    for outcome, alone in zip(last, run_cells(asked, tmp_path / "whole", jobs=1), strict=True):
        assert numbers(outcome.folder) == numbers(alone.folder)


@pytest.mark.slow
def test_ctrl_c_then_the_same_command(tmp_path: Path) -> None:
    write(tmp_path, rounds=ENDLESS)
    process = Fork(["-m", "normec", "sweep", "grid.toml", "--jobs", "2", "--quiet"], tmp_path)
    cells = tmp_path / "runs" / "grid" / "cells"
    wait_for(lambda: list(cells.glob("*/metrics.jsonl")), "the first cell's first row", lambda: goes_on(process))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "error: interrupted; the same command continues where it stopped\n"
    begun = list(cells.glob("*/summary.json"))
    assert begun
    assert {json.loads(path.read_text())["status"] for path in begun} == {"interrupted"}
    for path in begun:
        assert (path.parent / "checkpoint" / "latest.json").exists()


def test_a_sweep_its_table_and_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rounds=12)
    assert run(["sweep", "grid.toml", "--dry-run", "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["waiting"] * 8
    assert not Path("runs").exists()
    assert run(["sweep", "grid.toml", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 8
    assert "8/8" in printed.err.splitlines()[-1]
    assert "Chosen by validation accuracy" in printed.out
    assert Path("runs/grid/sweep.toml").read_text() == Path("grid.toml").read_text()
    assert run(["sweep", "grid.toml", "--jobs", "1"]) == 0
    assert capsys.readouterr().err == "8 of 8 cells had ended before\n"
    assert run(["sweep", "grid.toml", "--dry-run"]) == 0
    assert "8 cells, 8 done" in capsys.readouterr().out

    assert run(["results", "runs", "--each", "--json"]) == 0
    each = json.loads(capsys.readouterr().out)
    assert len(each) == 8
    assert run(["results", "runs/grid", "--json"]) == 0  # tuned, as the sweep's own file says
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        means = {
            lr: sum(r["validation_accuracy"] for r in each if (r["beta"], r["lr"]) == (row["beta"], lr)) / 2
            for lr in (0.05, 0.5)
        }
        assert row["validation_accuracy"] == pytest.approx(max(means.values()))
        assert means[row["lr"]] == pytest.approx(max(means.values()))
    assert run(["results", "runs/grid", "--format", "markdown"]) == 0
    heads, _, *cells = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    )
    assert [dict(zip(heads, line, strict=True))["validation accuracy"].split(" ± ")[0] for line in cells] == [
        f"{100 * row['validation_accuracy']:.2f}" for row in rows
    ]
    # The chosen value is shown even where it is the same in all rows.
    assert [dict(zip(heads, line, strict=True))["lr"] for line in cells] == [f"{row['lr']:g}" for row in rows]
    assert run(["results", "runs", "--format", "csv", "--out", "all.csv"]) == 0
    with Path("all.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    capsys.readouterr()
    assert run(["results", "runs/grid", "--tune", "none"]) == 0
    assert "Chosen" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_setting_changed_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rounds=500)
    assert run(["sweep", "grid.toml", "--set", "rounds=2", "--jobs", "1", "--quiet"]) == 0
    kept = grid.load("runs/grid/sweep.toml")
    assert {cell.config.rounds for cell in kept.cells} == {2}
    assert {json.loads(path.read_text())["rounds"] for path in Path("runs").rglob("summary.json")} == {2}


def test_a_diverging_cell_is_reported_and_a_failing_one_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = 'private = false\nclients = 10\nrounds = 10\nmodel = "mlp"\nmethod = "gd"\n[grid]\n'
    Path("diverging.toml").write_text(shared + "lr = [0.1, 1e30]\n")
    assert run(["sweep", "diverging.toml", "--jobs", "1", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "diverged: lr 1e+30: " in said
    assert "not finite in round" in said
    Path("failing.toml").write_text(shared + 'data = ["libsvm:none.svm", "digits"]\n')
    assert run(["sweep", "failing.toml", "--jobs", "1", "--quiet"]) == 1
    assert "failed: data libsvm:none.svm: " in capsys.readouterr().out


MISTAKES = [
    (["sweep", "missing.toml"], "there is no grid file missing.toml"),
    (["sweep", "empty.toml"], "the grid is empty"),
    (["sweep", "wrong.toml"], "did you mean 'beta'"),
    (["sweep", "good.toml", "--set", "lr=1"], "lr occurs in [grid] and in the shared settings"),
    (["sweep", "good.toml", "--jobs", "0"], "jobs must be a whole number >= 1"),
    (["sweep", "good.toml", "--together", "0"], "together must be a whole number >= 1"),
    (["sweep", "good.toml", "--out", "/proc/sweep"], "cannot write to /proc/sweep"),
    (["sweep", "good.toml", "--out", "good.toml"], "good.toml is a file; a sweep needs a folder"),
    (["sweep", "good.toml", "--set", "device=toaster"], "no device 'toaster'"),
    (["results", "missing"], "there is no folder missing"),
    (["results", "."], "there are no runs in"),
    (["results", "good.toml"], "good.toml is a file"),
    (["results", ".", "--format", "xlsx"], "unknown format 'xlsx'"),
    (["results", ".", "--format", "parquet"], "give --out FILE"),
    (["results", ".", "--out", "x"], "--out needs"),
    (["results", ".", "--each", "--tune", "lr"], "leave --tune and --by out"),
    (["results", ".", "--by", "loss"], "give the setting to choose with --tune"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty.toml": "rounds = 3\n[grid]\n", "wrong.toml": "[grid]\nbetta = [1.0]\n"}
    files["good.toml"] = "private = false\nrounds = 2\n[grid]\nlr = [1.0]\n"
    for name, text in files.items():
        Path(name).write_text(text)
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.out == ""
    assert {path.name for path in tmp_path.iterdir()} == files.keys()
    assert {name: Path(name).read_text() for name in files} == files


def test_test_data_has_no_say_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.execute(grid.expand({"private": False, "rounds": 2, "clients": 5, "seeds": 1}).cells[0].config, Path("run"))
    assert run(["results", "run", "--tune", "lr", "--by", "accuracy"]) == 2
    assert "would choose settings on test data" in capsys.readouterr().err
    assert run(["results", "run", "--tune", "lr", "--by", "accuracy", "--on-test"]) == 0


def test_time_left_and_best_so_far() -> None:
    cells = grid.expand({"private": False, "validation": 0.2, "grid": {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]}}).cells
    now = 0.0
    tally = SweepProgress(5, "validation_accuracy", clock=lambda: now)
    assert tally.left() is None
    tally.update(Event(cells[0]))
    tally.update(Event(cells[1]))
    now = 2.0
    tally.update(Event(cells[0], 0, 100))
    now = 6.0
    tally.update(Event(cells[0], 50, 100))
    # 12.5 rounds/s: 4 s to go, 10 s in all; the second has used 6 s of such 10; three wait for two places.
    assert tally.left() == pytest.approx((3 * 10 + 4 + 4) / 2)
    for cell, accuracy in ((cells[0], 0.6), (cells[1], 0.9)):
        summary = {"status": "finished", "final": {"validation_accuracy": accuracy}, "config": cell.config.model_dump()}
        tally.update(Event(cell, outcome=Outcome(cell, "finished", Path("run"), summary)))
    assert tally.left() == pytest.approx(3 * 6 / 2)
    assert tally.line() == "2 of 5 done, 0 running, best so far validation accuracy 90.00 % with lr 0.2, 9 s left"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 89, 200, 7500)] == ["0 s", "89 s", "3:20 min", "2:05 h"]
