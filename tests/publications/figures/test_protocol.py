"""Readings of the protocol have names; another reading is another run, and what is unknown is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normec.cli.app import run
from normec.experiments.sweep import run_cells
from publications.alpha_normec.figures import arms, figures, protocol
from publications.alpha_normec.figures.results import Results

DIGITS: dict[str, Any] = {"data": "digits", "model": "softmax", "private_model": "softmax"}


def digests(*names: str, **readings: Any) -> set[str]:
    made = protocol.make("smoke", readings)
    return {cell.config.digest() for cell in figures.cells(figures.named(names), made)}


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
        cell.config.digest() for cell in figures.cells(figures.named(["fig-sn"]), protocol.make("smoke", reading))
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


def test_what_is_read_off_runs_does_not_change_them() -> None:
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
    assert protocol.sigma(made, 1.0, 300) == pytest.approx(wanted)
    assert protocol.sigma(made, 0.1, 300) == pytest.approx(0.1 * wanted)


def test_the_papers_scale_takes_the_papers_step_sizes() -> None:
    made = protocol.make("paper", DIGITS)
    cells = figures.cells(figures.named(["tab-ef", "fig-ef", "tab-sn", "tab-clip"]), made)
    found = {(cell.settings["method"], cell.settings["beta"]): cell.config.lr for cell in cells}
    assert len(found) == len(cells) == 16
    assert found["NormEC without SN", 10.0] == 0.01
    assert found["NormEC with SN", 0.01] == 0.01
    assert found["DP-SGD, no noise", 0.01] == 1.0
    assert found["Clip21", 10.0] == 0.1
    assert {cell.config.epochs for cell in cells} == {300}
    chosen = figures.cells(figures.named(["tab-ef"]), protocol.make("paper", {**DIGITS, "choose": "validation"}))
    assert len(chosen) == 2 * 4 * 4


def test_the_papers_numbers_are_the_defaults() -> None:
    made = protocol.make("paper")
    assert (made.data, made.model, made.private_model) == ("cifar10", "resnet20", "resnet20-gn")
    assert (made.clients, made.batch_size, made.rounds, made.short_rounds, made.seed) == (10, 32, 300, 150, 42)
    assert made.lrs == (0.001, 0.01, 0.1, 1.0)
    assert (made.betas, made.private_betas) == ((0.01, 0.1, 1.0, 10.0), (0.001, 0.01, 0.1, 1.0))
    assert (made.alphas, made.alpha, made.validation, made.round) == ((0.01, 0.1, 1.0), 0.01, 0.1, "epoch")


@pytest.mark.slow
def test_runs_that_diverge_are_told_as_such(tmp_path: Path) -> None:
    readings = {"model": "mlp", "betas": (0.1,), "lrs": (1e30, 0.1), "rounds": 1}
    figures.reproduce(figures.named(["tab-clip"]), protocol.make("smoke", readings), tmp_path, jobs=1)
    told = json.loads((tmp_path / "tab-clip.json").read_text())
    assert {(run["lr"], run["status"]) for run in told["runs"]} == {(1e30, "diverged"), (0.1, "finished")}
    assert [row["lr"] for row in told["rows"]] == [0.1, 0.1]
    worse = {**readings, "private_model": "mlp", "alphas": (0.01,), "private_betas": (0.1,), "lrs": (1e30,)}
    made, failed = figures.reproduce(figures.named(["all"]), protocol.make("smoke", worse), tmp_path, jobs=1)
    assert (len(made), failed) == (13, [])
    told = json.loads((tmp_path / "tab-clip.json").read_text())
    assert [row["final_accuracy"] for row in told["rows"]] == [None, None]
    assert [row["difference"] for row in told["compared"]] == [None, None, None]
    assert "no run came to its end" in (tmp_path / "fig-dp-heatmaps-compared.md").read_text()


def test_the_accuracy_may_be_that_of_the_share_held_out(tmp_path: Path) -> None:
    readings = {"betas": (0.1,), "lrs": (0.1,), "rounds": 2}
    cells = arms.cells(protocol.make("smoke", readings), arms.NORMEC, (0.1,), (0.1,))
    (outcome,) = run_cells(cells, tmp_path, jobs=1)
    for accuracy, column in (("test", "accuracy"), ("held-out", "validation_accuracy")):
        results = Results(protocol.make("smoke", {**readings, "accuracy": accuracy}), [outcome])
        assert results.final(outcome) == 100 * outcome.history.rows[-1][column]
        assert results.highest(outcome) == 100 * max(outcome.history[column])


def test_a_run_that_fails_is_named_and_nothing_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["reproduce", "fig-dp-clip", "--set", "private_betas=[0.1]", "--set", "lrs=[0.1]", "--set", "rounds=1"]
    readings = {"private_betas": (0.1,), "lrs": (0.1,), "rounds": 1}
    (cell,) = figures.cells(figures.named(["fig-dp-clip"]), protocol.make("smoke", readings))
    folder = tmp_path / "smoke" / "cells" / cell.name
    folder.mkdir(parents=True)
    (folder / "chapter.txt").write_text("mine")
    assert run([*only, "--out", str(tmp_path), "--quiet"]) == 1
    assert "failed: DP-Clip21 beta 0.1 lr 0.1" in capsys.readouterr().err
    assert not list((tmp_path / "smoke").glob("fig-*"))
    (folder / "chapter.txt").unlink()
    assert run([*only, "--out", str(tmp_path), "--quiet"]) == 0
    (row,) = json.loads((tmp_path / "smoke" / "fig-dp-clip.json").read_text())["rows"]
    assert row["digest"] == cell.config.digest()


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
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_list_names_every_figure_and_reading(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "--list"]) == 0
    text = capsys.readouterr().out
    assert run(["reproduce", "--list", "--scale", "paper", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["figures"]) == 13
    assert all(one["name"] in text for one in (*told["figures"], *told["settings"]))
    values = {one["name"]: one["value"] for one in told["settings"]}
    assert (values["round"], values["noise"], values["rounds"]) == ("epoch", "total-variance", 300)
