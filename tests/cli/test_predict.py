"""normec predict: a trained model chooses a class for each record of a table, and mistakes are answered in one line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from normec.cli.app import run

SCHEMA = """
target = "disease"
classes = ["none", ["mild", "severe"]]

[inputs]
age = {low = 20, high = 80}
sex = {categories = ["female", "male"]}
"""
MODEL = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
"""
NEW = ((25, "female"), (79, "male"), (50, "male"), (90, "female"), (20, "male"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a table, its schema, a model and new records."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    people = [(int(draw.integers(20, 80)), str(draw.choice(["female", "male"]))) for _ in range(60)]
    ill = ["none" if age + 9 * (sex == "male") < 50 else "mild" if age < 60 else "severe" for age, sex in people]
    rows = [f"{age},{sex},{found}" for (age, sex), found in zip(people, ill, strict=True)]
    Path("patients.csv").write_text("\n".join(["age,sex,disease", *rows]) + "\n")
    Path("new.csv").write_text("\n".join(["age,sex", *(f"{age},{sex}" for age, sex in NEW)]) + "\n")
    Path("patients.toml").write_text(SCHEMA)
    Path("net.py").write_text(MODEL)


def train(*words: str) -> None:
    settings = ["--data-schema", "patients.toml", "--clients", "4", "--no-privacy", "--rounds", "30", "--lr", "0.1"]
    assert run(["train", "--data", "patients.csv", *settings, "--out", "run", "--quiet", *words]) == 0


def expected(layers: list[tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """The classes of the new records by hand: the public scaling, affine layers with ReLU between them, the maximum."""
    values = np.array([[np.clip((age - 20) / 30 - 1, -1, 1), 1 if sex == "male" else -1] for age, sex in NEW])
    for number, (weight, bias) in enumerate(layers):
        values = (np.maximum(values, 0) if number else values) @ weight.T + bias
    return [("none", "mild/severe")[number] for number in values.argmax(1)]


def test_classes_are_those_of_the_model_computed_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    Path("patients.csv").unlink()  # whoever uses the model does not have the patients
    capsys.readouterr()
    assert run(["predict", "run", "new.csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    held = load_file("run/model.safetensors")
    weight = next(value for value in held.values() if value.ndim == 2)
    bias = next(value for value in held.values() if value.ndim == 1)
    found = expected([(weight, bias)])
    assert set(found) == {"none", "mild/severe"}
    assert rows == [["record", "disease"], *([str(number + 1), one] for number, one in enumerate(found))]
    assert run(["predict", "run", "new.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"disease": found}


def test_a_model_with_one_output_chooses_by_its_sign(capsys: pytest.CaptureFixture[str]) -> None:
    train("--model", "logistic")
    capsys.readouterr()
    assert run(["predict", "run", "new.csv", "--json"]) == 0
    weights = np.concatenate([value.flatten() for value in load_file("run/model.safetensors").values()])
    zeros = np.zeros_like(weights)
    affine = np.stack([zeros, weights])
    found = expected([(affine[:, :2], affine[:, 2] if len(weights) == 3 else np.zeros(2))])
    assert json.loads(capsys.readouterr().out) == {"disease": found}


def test_a_model_of_the_users_own_is_run_only_if_the_command_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    train("--model", "net.py:net")
    capsys.readouterr()
    assert run(["predict", "run", "new.csv"]) == 2
    assert capsys.readouterr().err == (
        "error: run holds the numbers of a model of your own, not its code; name it with --model FILE.py:NAME\n"
    )
    assert run(["predict", "run", "new.csv", "--model", "net.py:net", "--json"]) == 0
    held = load_file("run/model.safetensors")
    found = expected([(held[f"{layer}.weight"], held[f"{layer}.bias"]) for layer in (0, 2)])
    assert json.loads(capsys.readouterr().out) == {"disease": found}


def test_a_schema_that_was_edited_since_changes_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """A range that is edited after training would scale new records in another way; a model cannot notice it."""
    train()
    capsys.readouterr()
    assert run(["predict", "run", "new.csv", "--json"]) == 0
    found = capsys.readouterr().out
    edited = {
        "age": SCHEMA.replace("high = 80", "high = 200"),
        "classes": SCHEMA.replace('["none", ["mild", "severe"]]', '[["mild", "severe"], "none"]'),
        "the order of the inputs": "\n".join([*SCHEMA.splitlines()[:5], *reversed(SCHEMA.splitlines()[5:])]) + "\n",
    }
    for changed, text in edited.items():
        Path("patients.toml").write_text(text)
        assert run(["predict", "run", "new.csv", "--json"]) == 0
        assert capsys.readouterr().out == found
        assert run(["predict", "run", "new.csv", "--schema", "patients.toml"]) == 2
        said = f"patients.toml differs from the schema that run was trained with ({changed}); leave out --schema"
        assert capsys.readouterr().err.startswith(f"error: {said}")
    Path("patients.toml").write_text(SCHEMA.replace("[inputs]", 'missing = "middle"\n\n[inputs]'))
    assert run(["predict", "run", "new.csv", "--schema", "patients.toml", "--json"]) == 0
    assert capsys.readouterr().out == found


def test_mistakes_are_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert run(["train", "--rounds", "1", "--no-privacy", "--out", "digits", "--quiet"]) == 0
    Path("wide.toml").write_text(SCHEMA + "weight = {low = 30, high = 150}\n")
    Path("wide.csv").write_text("age,sex,weight\n30,male,80\n")
    Path("few.csv").write_text("age\n30\n")
    capsys.readouterr()
    for words, said in (
        (("digits", "new.csv"), "digits names no schema of a table; give the one that it was trained with by --schema"),
        (("none", "new.csv"), "none has no finished or interrupted run"),
        (("run", "few.csv"), "few.csv has no column 'sex'"),
        (
            ("run", "wide.csv", "--schema", "wide.toml"),
            "wide.toml differs from the schema that run was trained with (weight); leave out --schema",
        ),
        (("run", "new.csv", "--model", "mlp"), "--model must be FILE.py:NAME, got 'mlp'"),
    ):
        assert run(["predict", *words]) == 2, words
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}"), error
        assert error.count("\n") == 1
