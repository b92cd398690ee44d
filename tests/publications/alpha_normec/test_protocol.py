"""Settings of the protocol: a change is another run, and an unknown name or value is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normec.cli.app import run
from publications.alpha_normec import plan, protocol, records, runner
from publications.alpha_normec.commands import app
from publications.alpha_normec.figures import catalogue
from publications.alpha_normec.methods import NORMEC
from publications.alpha_normec.results import Results
from publications.alpha_normec.runner import Folders

pytestmark = pytest.mark.slow  # nothing of the library depends on it

DIGITS: dict[str, Any] = {"data": "digits", "model": "softmax", "private_model": "softmax"}


def digests(*names: str, **readings: Any) -> set[str]:
    made = protocol.make("smoke", readings)
    return {cell.config.digest() for cell in catalogue.cells(catalogue.named(names), made)}


@pytest.mark.parametrize(
    "reading",
    [
        {"round": "step"},
        {"validation": 0.2},
        {"split": "label"},
        {"augment": False},
        {"memory_start": "gradient"},
        {"seed": 1},
        {"rounds": 7},
        {"batch_size": 16},
        {"alpha": 0.1},
    ],
)
def test_another_reading_is_another_run(reading: dict[str, Any]) -> None:
    changed = {
        cell.config.digest() for cell in catalogue.cells(catalogue.named(["fig-sn"]), protocol.make("smoke", reading))
    }
    assert len(changed) == len(digests("fig-sn")) == 24
    assert changed.isdisjoint(digests("fig-sn"))


@pytest.mark.parametrize(
    "reading",
    [
        {"noise": "total-norm"},
        {"noise_rounds": "messages"},
        {"noise_rounds": "shared"},
        {"trust": "secure-sum"},
        {"relation": "replace"},
        {"formula_epsilon": 4.0},
        {"private_model": "mlp"},
    ],
)
def test_a_reading_of_the_noise_changes_private_runs_alone(reading: dict[str, Any]) -> None:
    assert digests("fig-dp-clip", **reading).isdisjoint(digests("fig-dp-clip"))
    assert digests("fig-sn", **reading) == digests("fig-sn")


def test_settings_of_the_figures_do_not_change_the_runs() -> None:
    assert digests("all", accuracy="held-out", device="cpu") == digests("all")


@pytest.mark.parametrize(
    ("noise", "value"),
    [
        ("per-coordinate", lambda s, _: s),
        ("total-norm", lambda s, d: s / math.sqrt(d)),
        ("variance", lambda s, _: math.sqrt(s)),
        ("total-variance", lambda s, d: math.sqrt(s / d)),
    ],
)
@pytest.mark.parametrize(
    ("counted", "rounds", "share"), [("rounds", 300, 1), ("messages", 1200, 1), ("shared", 300, 4)]
)
def test_the_noise_by_every_reading(noise: str, value: Any, counted: str, rounds: int, share: int) -> None:
    made = protocol.make("paper", {**DIGITS, "noise": noise, "noise_rounds": counted})
    wanted = value(math.sqrt(rounds * math.log(1e5)) / 8, 650) / math.sqrt(share)
    assert protocol.sigma(made, 1.0) == pytest.approx(wanted)
    assert protocol.sigma(made, 0.1) == pytest.approx(0.1 * wanted)


def test_the_papers_scale_takes_the_papers_step_sizes() -> None:
    made = protocol.make("paper", DIGITS)
    cells = catalogue.cells(catalogue.named(["tab-ef", "fig-ef", "tab-sn", "tab-clip"]), made)
    found = {(cell.method.name, cell.beta): cell.config.lr for cell in cells}
    assert len(found) == len(cells) == 16
    assert found["NormEC without SN", 10.0] == 0.01
    assert found["NormEC with SN", 0.01] == 0.01
    assert found["DP-SGD, no noise", 0.01] == 1.0
    assert found["Clip21", 10.0] == 0.1
    assert {cell.config.epochs for cell in cells} == {300}
    chosen = catalogue.cells(catalogue.named(["tab-ef"]), protocol.make("paper", {**DIGITS, "choose": "validation"}))
    assert len(chosen) == 2 * 4 * 4


def test_the_papers_numbers_are_the_defaults() -> None:
    made = protocol.make("paper")
    assert (made.data, made.model, made.private_model) == ("cifar10", "resnet20", "resnet20-gn")
    assert (made.clients, made.batch_size, made.rounds, made.short_rounds, made.seed) == (10, 32, 300, 150, 42)
    assert made.lrs == (0.001, 0.01, 0.1, 1.0)
    assert made.private_lrs == (0.001, 0.01, 0.1)
    assert (made.betas, made.private_betas) == ((0.01, 0.1, 1.0, 10.0), (0.001, 0.01, 0.1, 1.0))
    assert (made.alphas, made.alpha, made.validation, made.round) == ((0.01, 0.1, 1.0), 0.01, 0.1, "epoch")


def draw(folder: Path, *names: str, **readings: Any) -> int:
    """The exit code of the command that draws figures at smoke scale."""
    settings = [word for name, value in readings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    return run(["figures", *names, *settings, "--runs", str(folder), "--jobs", "1", "--quiet"], app)


def test_runs_that_diverge_are_shown_as_such(tmp_path: Path) -> None:
    readings = {"model": "mlp", "betas": [0.1], "lrs": [1e30, 0.1], "rounds": 1}
    assert draw(tmp_path, "tab-clip", **readings) == 0
    content = json.loads((tmp_path / "figures" / "tab-clip.json").read_text())
    assert {(one["lr"], one["status"]) for one in content["runs"]} == {(1e30, "diverged"), (0.1, "finished")}
    assert [row["lr"] for row in content["rows"]] == [0.1, 0.1]
    worse = {**readings, "private_model": "mlp", "alphas": [0.01], "private_betas": [0.1]}
    assert draw(tmp_path, "all", **{**worse, "lrs": [1e30], "private_lrs": [1e30]}) == 0
    content = json.loads((tmp_path / "figures" / "tab-clip.json").read_text())
    assert [row["final_accuracy"] for row in content["rows"]] == [None, None]
    assert [row["difference"] for row in content["compared"]] == [None, None, None]
    assert "no run finished" in (tmp_path / "figures" / "fig-dp-heatmaps-compared.md").read_text()


def test_the_accuracy_may_be_that_of_the_held_out_records(tmp_path: Path) -> None:
    readings = {"betas": (0.1,), "lrs": (0.1,), "rounds": 2}
    base = protocol.make("smoke", readings)
    cell = plan.cell_at(base, NORMEC, 0.1, 0.1)
    assert runner.run(base, [cell.name], Folders(tmp_path, tmp_path), jobs=1)
    (record,) = records.read(tmp_path, plan.plan(base)).values()
    for accuracy, column in (("test", "test"), ("held-out", "held_out")):
        other = protocol.make("smoke", {**readings, "accuracy": accuracy})
        assert other.column == column
        assert Results(other, {cell.name: record}).curve(cell).accuracy == record["curve"][column]
    assert record["curve"]["test"] != record["curve"]["held_out"]


def test_a_run_that_fails_is_named_and_nothing_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readings: dict[str, Any] = {"private_betas": [0.1], "private_lrs": [0.1], "rounds": 1}
    made = protocol.make("smoke", {name: tuple(v) if isinstance(v, list) else v for name, v in readings.items()})
    (cell,) = catalogue.cells(catalogue.named(["fig-dp-clip"]), made)
    folder = tmp_path / "cells" / f"name-{cell.name}-{cell.config.digest()}"
    folder.mkdir(parents=True)
    (folder / "chapter.txt").write_text("mine")
    assert draw(tmp_path, "fig-dp-clip", **readings) == 1
    assert f"{cell.name}: failed: " in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()
    (folder / "chapter.txt").unlink()
    assert draw(tmp_path, "fig-dp-clip", **readings) == 0
    (row,) = json.loads((tmp_path / "figures" / "fig-dp-clip.json").read_text())["rows"]
    assert row["digest"] == cell.config.digest()


def test_another_protocol_in_the_same_folder_replaces_the_figures_and_keeps_the_runs(tmp_path: Path) -> None:
    small: dict[str, Any] = {"private_betas": [0.1], "private_lrs": [0.1]}
    for rounds in (1, 2, 1):
        assert draw(tmp_path, "fig-dp-clip", **small, rounds=rounds) == 0
        content = json.loads((tmp_path / "figures" / "fig-dp-clip.json").read_text())
        assert content["protocol"]["rounds"] == rounds
    assert len(list((tmp_path / "cells").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fig-eff"], "did you mean 'fig-ef'?"),
        (["tab-ef", "fig-heatmp"], "did you mean 'fig-heatmap'?"),
        (["all", "--scale", "papr"], "did you mean 'paper'?"),
        (["all", "--set", "noize=total-norm"], "did you mean 'noise'?"),
        (["all", "--set", "noise=loud"], "noise: input should be"),
        (["all", "--set", "rounds=many"], "rounds: input should be a valid integer"),
        (["all", "--set", "data=digit"], "did you mean 'digits'?"),
        (["all", "--set", "private_model=resnet20"], "resnet20 needs images"),
        ([], "name a figure"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["figures", *arguments, "--runs", str(tmp_path / "out")], app) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_list_names_every_figure_and_reading(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["figures", "--list"], app) == 0
    text = capsys.readouterr().out
    assert run(["figures", "--list", "--scale", "paper", "--json"], app) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["figures"]) == 13
    assert all(one["name"] in text for one in (*listed["figures"], *listed["settings"]))
    values = {one["name"]: one["value"] for one in listed["settings"]}
    assert (values["round"], values["noise"], values["rounds"]) == ("epoch", "total-variance", 300)


def test_the_list_of_settings_says_which_of_them_the_paper_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["figures", "--list"], app) == 0
    _, stated, left_open, own = capsys.readouterr().out.split(" (--set NAME=VALUE):")
    assert "  delta = 1e-05" in stated
    assert "  memory_start = zero" in left_open
    assert "  device = cpu" in own
