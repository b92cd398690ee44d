"""normec suggest: the table, JSON, and a command that trains with what it suggests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from normec.cli.app import run

from .command import normec

CASES = [
    ("--data", "digits", "--epsilon", "8"),
    ("--data", "digits", "--clients", "30", "--method", "clip21", "--rounds", "70", "--trust", "local"),
    ("--data", "breast_cancer", "--clients", "5", "--unit", "record", "--epsilon", "1"),
    ("--data", "heart-disease", "--unit", "record", "--trust", "local", "--epsilon", "1"),
    ("--no-privacy", "--method", "normec", "--set", "hidden=32", "--model", "mlp"),
]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", CASES)
def test_the_command_trains_with_the_suggestion(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(answer(capsys, "suggest", *arguments, "--json"))
    words = shlex.split(found["command"])
    assert words[:2] == ["normec", "train"]
    used = json.loads(answer(capsys, *words[1:], "--settings", "--json"))
    asked = json.loads(answer(capsys, "train", *arguments, "--settings", "--json"))
    suggested = {one["name"]: one["value"] for one in found["settings"]}
    assert {name: used[name] for name in suggested} == suggested
    assert used["method"] == found["method"]
    for name in ("data", "clients", "model", "hidden", "epsilon", "unit", "trust", "weights", "private"):
        assert used[name] == asked[name]


def test_a_data_set_with_settings_of_its_own_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(answer(capsys, "suggest", *CASES[3], "--json"))
    usual = json.loads(answer(capsys, "train", *CASES[3], "--settings", "--json"))
    assert {one["name"] for one in found["settings"]} == {"tau", "lr", "rounds"}
    for one in found["settings"]:
        assert one["value"] == usual[one["name"]]
        assert "cross-validation" in one["reason"]


def test_the_table_has_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(answer(capsys, "suggest", *CASES[0]).split())
    found = json.loads(answer(capsys, "suggest", *CASES[0], "--json"))
    for one in found["settings"]:
        assert one["name"] in text
        assert one["reason"] in text
    assert found["outlook"] in text
    assert "100 clients, 650 parameters" in text
    assert found["command"] in text


@pytest.mark.slow
def test_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data = "digits"\nclients = 40\nepsilon = 2.0\n')
    found = json.loads(normec("suggest", "run.toml", "--json", cwd=tmp_path).stdout)
    assert found["facts"]["clients"] == 40
    assert found["command"].startswith("normec train run.toml --method normec --rounds 200")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "lr=0.1"), "a suggestion is for runs without lr; leave it out"),
        (("--set", "batch_size=4"), "a suggestion is for runs without batch_size; leave it out"),
        (("--method", "fedavg"), "there is no rule for the settings of fedavg with noise"),
        (("--method", "normec", "--unit", "record"), "only dpsgd-clip has a rule"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["suggest", *arguments]) == 2
    assert says in capsys.readouterr().err
