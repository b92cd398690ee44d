"""normec train --early-stopping: where a run stops, the ε of all planned rounds, and mistakes, which leave no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normec.cli.app import run

RUN = ["train", "--rounds", "60", "--seed", "0", "--validation", "0.2", "--set", "evaluate_every=2", "--quiet"]
RULE = ["--early-stopping", "validation_accuracy", "--patience", "2"]


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def by_hand(accuracies: list[float], patience: int) -> int:
    """The position at which the best accuracy is `patience` evaluations old."""
    position = patience
    while max(accuracies[: position - patience + 1]) < max(accuracies[position - patience + 1 : position + 1]):
        position += 1
    return position


def test_a_run_stops_at_the_row_that_the_rule_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*RUN, "--out", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert run([*RUN, *RULE, "--out", "early", "--json"]) == 0
    early = json.loads(capsys.readouterr().out)
    evaluated = [row for row in rows("whole") if "validation_accuracy" in row]
    last = evaluated[by_hand([row["validation_accuracy"] for row in evaluated], 2)]["round"]
    assert last < 58
    assert (early["status"], early["round"]) == ("stopped", last + 1)
    assert [row for row in rows("early") if row["round"] <= last] == [
        row for row in rows("whole") if row["round"] <= last
    ]
    # What the ledger paid is less than the target; what is promised is the ε of all planned rounds.
    assert rows("early")[-1]["epsilon"] < 0.9 * whole["privacy"]["epsilon"]
    assert early["privacy"]["epsilon"] == pytest.approx(whole["privacy"]["epsilon"])
    assert any("all 60 planned rounds" in note for note in early["privacy"]["notes"])

    assert run(["train", "early/config.toml", "--out", "early", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == early["round"]
    assert run([*RUN, "--out", "early"]) == 2
    assert "early_stopping is 'validation_accuracy' there, None here" in capsys.readouterr().err


MISTAKES = {
    "--patience 3": "patience goes with early_stopping",
    "--early-stopping validation_loss": "add --validation 0.2",
    "--early-stopping validation_f1 --validation 0.2": "write early_stopping=validation_f1:max or validation_f1:min",
    "--early-stopping validation_f1:max --validation 0.2": "does not measure 'validation_f1'",
    "--early-stopping validation_loss:up --validation 0.2": "COLUMN:min or COLUMN:max",
    "--early-stopping validation_loss --validation 0.2 --patience 0": "patience must be a whole number >= 1, got 0",
    "--early-stopping loss --diagnostics": "stop by a result on validation data",
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("words", "says"), MISTAKES.items(), ids=MISTAKES.keys())
def test_a_rule_that_cannot_be_followed_leaves_no_run(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--out", "run", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert says in said
    assert not any(path.name != ".lock" for path in tmp_path.glob("run/*"))
    assert run(["train", "--out", "run", "--rounds", "2", "--quiet"]) == 0
