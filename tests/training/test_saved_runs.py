"""Runs from Python leave the same files as the command line, and can be saved, loaded and used for predictions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import normec as n
from normec.experiments import build, results, runs
from normec.experiments.export import to_csv
from normec.privacy.ledger_verification import verified
from normec.report import page
from normec.report.run_view import read_run
from normec.settings import make
from normec.storage.history import History, in_a_line
from normec.training.prediction import predicted

from ..support.runs import InterruptAt


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def halved(inputs: Tensor) -> Tensor:
    return inputs / 2


def problem(**how: Any) -> n.Problem:
    draw = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(9, 4, generator=draw), torch.arange(9) % 3) for _ in range(5)]
    return n.Problem(net(), nn.functional.cross_entropy, sets[:4], test=sets[4], **how)


def trained(**how: Any) -> n.Run:
    return n.train(problem(), n.NormEC(alpha=0.1, beta=0.2), **{"lr": 0.1, "rounds": 6, "seed": 0, **how})


PRIVATE = n.Privacy(epsilon=4.0, trust="central")


@pytest.mark.parametrize("privacy", [None, PRIVATE])
def test_a_run_from_python_leaves_the_files_of_the_command_line(tmp_path: Path, privacy: n.Privacy | None) -> None:
    run = trained(out=tmp_path / "python", privacy=privacy)
    private = {"epsilon": 4.0} if privacy is not None else {"private": False}
    runs.execute(make({"rounds": 6, "clients": 4, "seed": 0, **private}), tmp_path / "command")

    def names(folder: str) -> set[str]:
        return {path.name for path in (tmp_path / folder).iterdir()}

    assert names("python") == names("command")
    found, known = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("python", "command"))
    assert found.keys() == known.keys()
    assert (found["status"], found["round"], found["rounds"], found["clients"]) == ("finished", 6, 6, 4)
    assert found["final"] == run.history.rows[-1]
    assert found["config"] == tomllib.loads((tmp_path / "python/config.toml").read_text())
    collected = results.collect([tmp_path])
    assert collected.notes == []
    rows = {Path(row["folder"]).name: row for row in results.each(collected.records)}
    assert rows["python"]["status"] == rows["command"]["status"] == "finished"
    assert rows["python"]["accuracy"] == run.history["accuracy"][-1]
    assert rows["python"]["data"] is None  # and not the default of the command line
    both = (found["config"], known["config"])
    assert len({(one.get("noise_schedule"), one.get("record_clip_by")) for one in both}) == 1
    assert read_run(tmp_path / "python").status == "finished"


def test_a_finished_run_is_not_changed_and_a_lost_page_is_written_again(tmp_path: Path) -> None:
    trained(out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    trained(out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    (tmp_path / "report.html").unlink()
    (tmp_path / "model.safetensors").unlink()
    trained(out=tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(before)
    assert (tmp_path / "model.safetensors").read_bytes() == before["model.safetensors"]


def test_an_interrupted_and_a_diverged_run_say_so(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(out=tmp_path / "killed", callbacks=[InterruptAt(3)])
    assert page.write(tmp_path / "killed").exists()
    hills = [lambda x: -(x**4).sum()]
    with pytest.raises(n.Diverged):
        n.train(n.Problem.from_functions(hills, torch.ones(2)), n.GD(), lr=1.0, rounds=50, out=tmp_path / "diverged")
    assert json.loads((tmp_path / "diverged/summary.json").read_text())["status"] == "diverged"
    with pytest.raises(n.UsageError, match="diverged: "):
        n.load(tmp_path / "diverged")


@pytest.mark.parametrize(
    ("operator", "name"), [(n.Clip(0.5), "dpsgd-clip"), (n.SmoothedNorm(0.1), "dpsgd-norm"), (n.Identity(), "dpsgd")]
)
def test_dpsgd_has_the_name_that_the_command_line_gives_it(tmp_path: Path, operator: Any, name: str) -> None:
    run = n.train(problem(name="wards"), n.DPSGD(operator), lr=0.1, rounds=2, seed=0, out=tmp_path)
    assert (run.settings["method"], run.settings["data"]) == (name, "wards")


def test_a_run_shows_its_result_in_a_line(tmp_path: Path) -> None:
    run = trained(out=tmp_path, privacy=PRIVATE)
    accuracy = run.history["accuracy"][-1]
    assert repr(run) == f"Run(normec, 6 of 6 rounds, accuracy {accuracy:.4g}, epsilon 4, in {tmp_path})"
    assert run.history.columns[0] == "round"
    assert not {"loss", "grad_norm"} & set(run.history.columns)  # of a private run they are not recorded


def test_the_line_of_a_run_does_not_round_its_epsilon_down() -> None:
    run = trained(privacy=dataclasses.replace(PRIVATE, epsilon=4.0004))
    assert "epsilon 4.001)" in repr(run)


def test_a_printed_run_says_that_no_noise_covers_its_loss() -> None:
    history = History()
    history.append({"round": 3, "loss": 0.5})
    assert in_a_line("gd", history, None, None, None) == "gd, loss 0.5"
    assert in_a_line("gd", history, "4", None, None) == "gd, loss 0.5 (not covered by the guarantee), epsilon 4"
    history.append({"round": 3, "test_loss": 0.25})
    assert in_a_line("gd", history, "4", None, None) == "gd, test loss 0.25, epsilon 4"


def test_plain_pytorch_loads_the_model(tmp_path: Path) -> None:
    run = trained(out=tmp_path)
    model, inputs = net(), torch.randn(7, 4)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert run.model is not None
    assert torch.equal(model(inputs), run.model(inputs))


def test_shared_parameters_are_saved_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.second(self.first(inputs))
            return outputs

    sets = [TensorDataset(torch.randn(5, 4), torch.arange(5) % 4)]
    tied = n.Problem(Tied(), nn.functional.cross_entropy, sets)
    run = n.train(tied, n.GD(), lr=0.1, rounds=2, out=tmp_path)
    model = Tied()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert run.model is not None
    assert torch.equal(model.second.weight, run.model.get_parameter("first.weight"))


@pytest.mark.parametrize("privacy", [None, PRIVATE])
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_is_saved_and_loaded(tmp_path: Path, privacy: n.Privacy | None, kept: bool) -> None:
    run = trained(privacy=privacy, out=tmp_path / "own" if kept else None)
    folder = run.save(tmp_path / "saved")
    again = n.load(folder, model=net())
    inputs = torch.randn(11, 4)
    assert run.model is not None
    assert torch.equal(again.predict(inputs), run.model(inputs).detach())
    assert torch.equal(again.x, run.x)
    assert again.history.rows == run.history.rows
    assert (again.finished, again.rounds, again.stopped) == (True, 6, None)
    assert again.privacy == run.privacy
    if privacy is not None and run.privacy is not None:
        paid = verified(folder)
        assert paid is not None
        assert (paid.releases, paid.epsilon) == (6, pytest.approx(run.privacy.epsilon, rel=1e-9))
    with pytest.raises(n.UsageError, match="is not empty"):
        run.save(folder)
    with pytest.raises(n.UsageError, match=r"latest\.json is missing"):
        trained(out=folder)


@pytest.mark.slow
def test_a_ledger_that_is_written_later_has_the_epsilon_of_sampled_and_scheduled_rounds(tmp_path: Path) -> None:
    for name, privacy in {
        "sampled": n.Privacy(epsilon=4.0, trust="central", relation="zero-out", sampling=0.5),
        "scheduled": n.Privacy(epsilon=4.0, trust="central", noise_schedule="linear:0.5"),
    }.items():
        run = trained(privacy=privacy)
        paid = verified(run.save(tmp_path / name))
        assert paid is not None
        assert run.privacy is not None
        assert paid.releases == 6
        assert paid.epsilon >= run.privacy.epsilon * (1 - 1e-9)
        assert n.load(tmp_path / name).privacy == run.privacy


def test_a_saved_private_run_without_its_ledger_is_refused(tmp_path: Path) -> None:
    trained(privacy=PRIVATE).save(tmp_path / "saved")
    (tmp_path / "saved/ledger.jsonl").unlink()
    with pytest.raises(n.UsageError, match=r"ledger\.jsonl is missing"):
        n.load(tmp_path / "saved")


def test_a_run_of_the_command_line_is_loaded_with_its_model(tmp_path: Path) -> None:
    result = runs.execute(make({"rounds": 4, "clients": 4, "private": False, "model": "mlp"}), tmp_path / "run")
    held = build.problem(make({"clients": 4, "private": False, "model": "mlp"}))
    assert held.test is not None
    inputs, targets = held.test.batch(0, None)
    again = n.load(tmp_path / "run")
    right = (again.predict(inputs).argmax(1) == targets).float().mean()
    assert float(right) == pytest.approx(result.summary["final"]["accuracy"], abs=1e-6)


@pytest.mark.parametrize("setting", ["model", "data"])
def test_a_file_that_a_folder_names_is_not_run(tmp_path: Path, setting: str) -> None:
    folder, trace = tmp_path / "run", tmp_path / "trace"
    runs.execute(make({"rounds": 2, "clients": 4, "private": False}), folder)
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nNAME = None\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"][setting] = f"{folder}/code.py:NAME"
    (folder / "summary.json").write_text(json.dumps(summary))
    again = n.load(folder)
    assert again.model is None
    assert again.tensors["weight"].shape == (10, 64)
    assert not trace.exists()
    with pytest.raises(n.UsageError, match=r"give the module: normec\.load\(folder, model=Net\(\)\)"):
        again.predict(torch.zeros(1, 64))


def test_predictions_are_those_of_the_model_on_transformed_inputs(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.1, "rounds": 3, "seed": 0, "out": tmp_path}
    run = n.train(problem(transform=halved), n.GD(), **how)
    inputs = np.random.default_rng(0).normal(size=(10, 4))  # float64, as NumPy gives it
    assert run.model is not None
    expected = run.model(torch.tensor(inputs).float() / 2).detach()
    torch.testing.assert_close(run.predict(inputs), expected)
    torch.testing.assert_close(run.predict(inputs, batch_size=3), expected)
    with pytest.raises(n.UsageError, match="transforms its inputs by halved"):
        n.load(tmp_path, model=net()).predict(inputs)
    torch.testing.assert_close(n.load(tmp_path, model=net(), transform=halved).predict(inputs), expected)


def test_predictions_that_are_impossible_are_refused(tmp_path: Path) -> None:
    run = trained(out=tmp_path)
    for wrong in (torch.ones(()), torch.ones(0, 4), [torch.ones(2, 4), torch.ones(3, 4)], "text"):
        with pytest.raises(n.UsageError, match="inputs must be"):
            run.predict(wrong)
    with pytest.raises(n.UsageError, match=r"a list with numbers in it; give torch\.tensor\(inputs\)"):
        run.predict([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(n.UsageError, match=r"model=Net\(\)"):
        n.load(tmp_path).predict(torch.ones(2, 4))
    with pytest.raises(n.UsageError, match="does not fit"):
        n.load(tmp_path, model=nn.Linear(4, 3))
    bowl = n.Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
    with pytest.raises(n.UsageError, match="plain functions"):
        n.train(bowl, n.GD(), lr=0.1, rounds=1).predict(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (torch.ones(5, 3), r"float32 of shape \[5, 3\], and the model cannot take them: its layer 0, .*in_features=4"),
        (torch.ones(5, 4).long(), r"int64 of shape \[5, 4\]"),
        ({"wrong": torch.ones(5, 4)}, r"a dict of 'wrong'"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_refused_in_one_line(inputs: Any, says: str) -> None:
    run = trained()
    with pytest.raises(n.UsageError, match=says) as refused:
        run.predict(inputs)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("give inputs with the columns and the type of the training records")
    assert run.predict(torch.ones(5, 4)).shape == (5, 3)  # what watched the layers is gone


class Forgetful(nn.Module):
    """A model that fails on more than one input, which is no matter of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 1:
            raise RuntimeError("out of memory")
        found: torch.Tensor = self.inner(inputs)
        return found


def test_a_failure_that_is_not_of_the_inputs_is_the_models_own() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        predicted(Forgetful(), torch.ones(5, 4), None, batch_size=5)
    assert predicted(Forgetful(), torch.ones(5, 4), None, batch_size=1).shape == (5, 3)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    trained(out=tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(
        n.UsageError, match=r"model\.safetensors is damaged: .*; restore it .*or remove it and call train"
    ):
        n.load(tmp_path, model=net())
    (tmp_path / "model.safetensors").unlink()
    trained(out=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == whole


@pytest.mark.slow
def test_the_history_is_drawn(tmp_path: Path) -> None:
    run = trained(out=tmp_path / "run")
    sheet = run.plot(tmp_path / "curves.png")
    drawn = [axis.lines[0].get_ydata() for axis in sheet.axes]
    assert list(drawn[0]) == pytest.approx(run.history["loss"])
    assert (tmp_path / "curves.png").stat().st_size > 1000
    (axis,) = n.load(tmp_path / "run").plot(columns=["memory_error"]).axes
    assert list(axis.lines[0].get_ydata()) == pytest.approx(run.history["memory_error"])
    with pytest.raises(n.UsageError, match="unknown column 'accuracies', did you mean 'accuracy'"):
        run.plot(columns=["accuracies"])


WITHOUT = """
import sys
sys.modules["safetensors"] = None
import torch, normec
bowl = normec.Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
print(normec.train(bowl, normec.GD(), lr=0.25, rounds=1).finished)
try:
    normec.train(bowl, normec.GD(), lr=0.25, rounds=1, out=sys.argv[1])
except normec.UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_safetensors_a_run_needs_no_folder_and_writes_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "run")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["True", "safetensors is needed and not installed; pip install safetensors"]
    assert not (tmp_path / "run").exists()


def test_metrics_of_the_users_own_are_on_the_page_and_in_the_table_of_results(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(9, 4, generator=draw), torch.arange(9) % 3) for _ in range(3)]
    metrics = {"third": lambda outputs, _: (outputs.argmax(1) == 2).double().mean()}
    held = n.Problem(net(), nn.functional.cross_entropy, sets[:2], test={"ward": sets[2]}, metrics=metrics)
    run = n.train(held, n.GD(), lr=0.1, rounds=4, out=tmp_path / "own")
    trained(out=tmp_path / "plain")
    rows = results.each(results.collect([tmp_path / "own", tmp_path / "plain"]).records)
    row, plain = rows
    assert plain["third"] is None
    assert to_csv(rows).count("\n") == 3
    assert row["third"] == run.history["third"][-1]
    assert row["ward_accuracy"] == run.history["accuracy"][-1]
    text = (tmp_path / "own/report.html").read_text()
    assert 'id="chart-own_third"' in text
    assert 'id="chart-own_ward_accuracy"' in text


def test_a_saved_run_is_shown_in_a_line_as_the_run_was(tmp_path: Path) -> None:
    run = trained(out=tmp_path)
    assert repr(n.load(tmp_path)) == f"Saved{run!r}"
