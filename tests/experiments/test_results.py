"""Tables of results against numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normec
from normec.errors import UsageError
from normec.experiments import export, grid, results, runs, tuning
from normec.settings import make
from normec.system.files import to_toml

GRID = {"grid": {"tau": [0.1, 0.2]}, "by": "loss"}


def leave(folder: Path, status: str = "finished", final: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A run's folder as a run leaves it, with numbers of our choice."""
    folder.mkdir(parents=True)
    config = make({"private": False, **settings})
    (folder / "config.toml").write_text(to_toml(config.record()))
    summary = {
        "status": status,
        "round": 9,
        "rounds": 9,
        "privacy": None,
        "final": final or {},
        "best_accuracy": (final or {}).get("accuracy"),
        "smallest_grad_norm": None,
        "timings": {"total": 2.0},
        "config": config.model_dump(exclude_none=True),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def fill(folder: Path) -> list[results.Record]:
    """Two betas × three step sizes × two seeds; validation and test data disagree about the best step size."""
    validated = {(0.1, 1.0): (0.6, 0.8), (0.1, 2.0): (0.9, 0.7), (0.1, 4.0): (0.95, None)}
    validated |= {(0.2, 1.0): (0.5, 0.5), (0.2, 2.0): (0.4, 0.4), (0.2, 4.0): (None, None)}
    for (beta, lr), pair in validated.items():
        for seed, accuracy in enumerate(pair):
            final = {"validation_accuracy": accuracy, "accuracy": 1 - lr / 10, "loss": lr * beta}
            status = "finished" if accuracy is not None else "diverged"
            where = folder / f"beta-{beta}-lr-{lr}-seed-{seed}"
            leave(where, status, final if accuracy is not None else {}, beta=beta, lr=lr, seed=seed)
    return results.collect([folder]).records


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    rows = {(row["beta"], row["lr"]): row for row in results.over_seeds(fill(tmp_path))}
    assert len(rows) == 6
    row = rows[0.1, 1.0]
    assert row["finished"] == 2
    assert row["validation_accuracy"] == pytest.approx(0.7)
    assert row["validation_accuracy_spread"] == pytest.approx(math.sqrt(2 * 0.1**2 / (2 - 1)))
    one = rows[0.1, 4.0]
    assert (one["finished"], one["diverged"]) == (1, 1)
    assert (one["validation_accuracy"], one["validation_accuracy_spread"]) == (0.95, None)
    none = rows[0.2, 4.0]
    assert (none["finished"], none["diverged"], none["validation_accuracy"]) == (0, 2, None)
    assert "seed" not in row


def test_epsilon_over_seeds_is_the_largest(tmp_path: Path) -> None:
    """A run that was killed has paid for a round twice; a mean would promise more than it keeps."""
    found = results.collect([leave(tmp_path / str(seed), seed=seed) for seed in range(3)]).records
    spent = [replace(one, paid=epsilon) for one, epsilon in zip(found, (2.0, 3.0, 2.0), strict=True)]
    assert results.over_seeds(spent)[0]["epsilon"] == 3.0


def test_the_step_size_is_chosen_on_validation_data_by_the_mean_over_seeds(tmp_path: Path) -> None:
    rows = {row["beta"]: row for row in results.tuned(fill(tmp_path), ["lr"], "validation_accuracy")}
    # 4.0 has the best single seed but lost the other one; test data alone would have taken 1.0.
    assert rows[0.1]["lr"] == 2.0
    assert rows[0.1]["validation_accuracy"] == pytest.approx(0.8)
    assert rows[0.1]["accuracy"] == pytest.approx(0.8)
    assert (rows[0.1]["tried"], rows[0.1]["edge"]) == (3, "")
    assert (rows[0.2]["lr"], rows[0.2]["edge"]) == (1.0, "lr")


def test_test_data_decides_only_if_that_is_asked_for(tmp_path: Path) -> None:
    records = fill(tmp_path)
    for column in tuning.TEST:
        with pytest.raises(UsageError, match="would choose settings on test data"):
            results.tuned(records, ["lr"], column)
    rows = {row["beta"]: row for row in results.tuned(records, ["lr"], "accuracy", on_test=True)}
    assert rows[0.1]["lr"] == 1.0


def test_less_is_better_for_a_loss_and_two_settings_are_tuned_together(tmp_path: Path) -> None:
    (row,) = results.tuned(fill(tmp_path), ["beta", "lr"], "loss")
    assert (row["beta"], row["lr"]) == (0.1, 1.0)
    assert row["tried"] == 6
    found = results.best(results.collect([tmp_path]).records, "loss")
    assert found is not None
    assert (found["beta"], found["lr"]) == (0.1, 1.0)


def test_where_every_value_diverged_there_is_no_best(tmp_path: Path) -> None:
    for lr in (1.0, 2.0):
        leave(tmp_path / f"{lr}", "diverged", lr=lr)
    (row,) = results.tuned(results.collect([tmp_path]).records, ["lr"], "loss")
    assert (row["lr"], row["diverged"], row["loss"]) == (None, 2, None)


def test_a_column_that_was_not_measured(tmp_path: Path) -> None:
    leave(tmp_path / "run", final={"loss": 1.0}, lr=1.0)
    records = results.collect([tmp_path]).records
    with pytest.raises(UsageError, match=r"set validation = 0\.2"):
        results.tuned(records, ["lr"], "validation_accuracy")
    with pytest.raises(UsageError, match="did you mean 'lr'"):
        results.tuned(records, ["lrr"], "loss")
    with pytest.raises(UsageError, match="seed cannot be tuned"):
        results.tuned(records, ["seed"], "loss")


def test_one_row_a_run_with_the_settings_that_differ(tmp_path: Path) -> None:
    rows = results.each(fill(tmp_path))
    assert len(rows) == 12
    assert list(rows[0])[:6] == ["data", "model", "method", "beta", "lr", "seed"]
    assert "rounds" in rows[0]
    assert "alpha" not in rows[0]
    assert {row["status"] for row in rows} == {"finished", "diverged"}


def test_a_real_run_reads_as_its_summary_says(tmp_path: Path) -> None:
    config = make({"clients": 5, "rounds": 3, "validation": 0.2, "diagnostics": True})
    result = runs.execute(config, tmp_path / "deep" / "down" / "run")
    (row,) = results.each(results.collect([tmp_path]).records)
    final = result.summary["final"]
    assert {key: row[key] for key in ("loss", "accuracy", "validation_loss")} == {
        key: final[key] for key in ("loss", "accuracy", "validation_loss")
    }
    assert row["epsilon"] == result.summary["privacy"]["epsilon"]
    assert row["seconds"] == result.summary["timings"]["total"]


@pytest.mark.parametrize(
    ("settings", "counted"), [({}, 2), ({"noise": "secure", "seed": 0}, 2), ({"seed": 0}, 1), ({"private": False}, 1)]
)
def test_runs_with_noise_of_their_own_are_different_runs(
    settings: dict[str, Any], counted: int, tmp_path: Path
) -> None:
    config = make({"clients": 5, "rounds": 2, **settings})
    for name in ("first", "second"):
        runs.execute(config, tmp_path / name)
    copied = shutil.copytree(tmp_path / "second", tmp_path / "copied")
    found = results.collect([tmp_path])
    assert len(found.records) == counted
    assert str(copied) in found.notes[0]
    assert found.notes[0].startswith("found twice, counted once: ")
    (row,) = results.over_seeds(found.records)
    assert row["finished"] == counted


def test_half_written_folders_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    leave(tmp_path / "whole", final={"loss": 1.0}, lr=1.0)
    begun = leave(tmp_path / "begun", lr=2.0)
    (begun / "summary.json").unlink()
    (begun / "metrics.jsonl").write_text('{"round": 4, "loss": 3.0}\n{"round": 5, "lo')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "summary.json").write_text('{"status": "fin')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text("")
    (tmp_path / "poor").mkdir()
    (tmp_path / "poor" / "summary.json").write_text('{"status": "finished"}')
    (tmp_path / "no-toml").mkdir()
    (tmp_path / "no-toml" / "config.toml").write_text("lr = ")
    found = results.collect([tmp_path])
    assert [(record.folder.name, record.status) for record in found.records] == [
        ("begun", "unfinished"),
        ("whole", "finished"),
    ]
    assert len(found.notes) == 5
    for name, says in {
        "begun": "at round 4",
        "cut": "is damaged",
        "bare": "no config.toml",
        "poor": "is damaged",
        "no-toml": "cannot be read as TOML",
    }.items():
        assert any(name in note and says in note for note in found.notes), (name, found.notes)


def test_the_same_configuration_counts_once(tmp_path: Path) -> None:
    leave(tmp_path / "a", "diverged", lr=1.0)
    leave(tmp_path / "b", final={"loss": 1.0}, lr=1.0, device="cpu")
    found = results.collect([tmp_path])
    assert [record.folder.name for record in found.records] == ["b"]
    assert found.notes == [f"found twice, counted once: {tmp_path / 'a'} is the same run as {tmp_path / 'b'}"]


def test_of_two_folders_of_one_run_the_larger_epsilon_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed may have paid for some rounds twice."""
    folders = [leave(tmp_path / name, lr=1.0) for name in ("a", "b")]
    read = {
        folder: replace(results._read(folder), paid=epsilon)
        for folder, epsilon in zip(folders, (2.0, 2.4), strict=True)
    }
    monkeypatch.setattr(results, "_read", read.__getitem__)
    found = results.collect([tmp_path])
    assert [record.folder.name for record in found.records] == ["b"]


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no runs in"):
        results.collect([tmp_path])
    with pytest.raises(UsageError, match="there is no"):
        results.collect([tmp_path / "missing"])


def test_csv_and_json_hold_the_same(tmp_path: Path) -> None:
    rows = results.over_seeds(fill(tmp_path))
    assert json.loads(export.to_json(rows)) == rows
    read = list(csv.DictReader(io.StringIO(export.to_csv(rows))))
    assert [list(line) for line in read] == [list(row) for row in rows]
    for line, row in zip(read, rows, strict=True):
        assert {key: text for key, text in line.items() if text} == {
            key: str(value) for key, value in row.items() if value is not None
        }


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'normec[tables]'")
    leave(tmp_path / "runs" / "theory", final={"loss": 1.0}, lr="theory")
    leave(tmp_path / "runs" / "number", final={"loss": 2}, lr=0.5)
    rows = results.each(results.collect([tmp_path / "runs"]).records)
    export.write_parquet(rows, tmp_path / "rows.parquet")
    read = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["lr"] for row in read] == ["0.5", "theory"]
    assert [{**row, "lr": str(row["lr"])} for row in rows] == read


def test_settings_of_a_method_of_ones_own_are_columns_that_can_be_tuned(tmp_path: Path) -> None:
    scores = {(0.1, 1): 0.5, (0.1, 2): 0.9, (0.2, 1): 0.7, (0.2, 2): 0.6}
    for (tau, forget), score in scores.items():
        own = {"method": "own.py:Own", "lr": 0.5, "method_settings": f"tau={tau},forget={forget},loss=3"}
        leave(tmp_path / f"{tau}-{forget}", final={"validation_accuracy": score}, **own)
    records = results.collect([tmp_path]).records
    assert {(row["tau"], row["forget"]): row["validation_accuracy"] for row in results.over_seeds(records)} == scores
    (row,) = results.tuned(records, ["tau", "forget"], "validation_accuracy")
    assert (row["tau"], row["forget"], row["tried"], row["loss"]) == (0.1, 2, 4, None)
    with pytest.raises(UsageError, match="did you mean 'forget'"):
        results.tuned(records, ["forgte"], "validation_accuracy")


def test_a_run_from_python_has_the_settings_of_its_method(tmp_path: Path) -> None:
    problem = normec.Problem.from_functions([lambda x: (x**2).sum()] * 2, torch.ones(3))
    for tau in (0.1, 0.2):
        method = normec.DPSGD(normec.Clip(tau))
        normec.train(problem, method, lr=0.1, rounds=2, seed=0, out=tmp_path / f"{tau}")
    rows = results.over_seeds(results.collect([tmp_path]).records)
    assert [(row["method"], row["tau"]) for row in rows] == [("dpsgd-clip", 0.1), ("dpsgd-clip", 0.2)]


def test_metrics_of_ones_own_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    for seed, recall in enumerate((0.5, 0.7)):
        leave(tmp_path / str(seed), final={"test_loss": 1.0, "recall": recall, "round": 9}, seed=seed)
    (row,) = results.over_seeds(results.collect([tmp_path]).records)
    assert row["recall"] == pytest.approx(0.6)
    assert row["recall_spread"] == pytest.approx(math.sqrt(0.02))
    assert "round" not in row


def test_no_file_that_a_folder_of_results_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace"
    code = f"import normec, pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Own(normec.NormEC): ...\n"
    named: dict[str, Any] = {"method": "shared/code.py:Own", "lr": 0.5}
    leave(tmp_path / "shared/run", final={"loss": 0.5}, **named, method_settings="alpha=0.25")
    (tmp_path / "shared/code.py").write_text(code)
    (tmp_path / "shared/unfinished").mkdir()
    (tmp_path / "shared/unfinished/config.toml").write_text(to_toml({**named, "private": False, "seed": 1}))
    (tmp_path / "shared/sweep.toml").write_text(to_toml({**named, "private": False, "tune": ["tau"]} | GRID))
    found = results.collect([Path("shared")]).records
    assert [record.settings["method"] for record in found] == ["shared/code.py:Own"] * 2
    assert (found[0].settings["alpha"], found[1].settings["alpha"]) == (0.25, None)
    assert grid.load("shared/sweep.toml", checked=False).tune == ("tau",)
    with pytest.raises(UsageError, match=r"method is 'shared/code\.py:Own' there, 'normec' here"):
        runs.existing(Path("shared/run"), make({"private": False}))
    assert not trace.exists()
    with pytest.raises(UsageError, match="tau does not apply"):
        grid.load("shared/sweep.toml")
    assert trace.exists()  # the file would have run
