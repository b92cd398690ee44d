"""Every figure at smoke scale: the numbers in its files are those of the runs, which are read independently."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from normec.cli.app import run
from publications.alpha_normec.commands import app
from publications.alpha_normec.figures.catalogue import FIGURES

from .conftest import ROUNDS, SHORT_ROUNDS, STEPS, Row, RunFiles, SmokeFigures

pytestmark = pytest.mark.slow

ALPHAS, BETAS, LRS = (0.01, 0.1, 1.0), (0.01, 0.1, 1.0, 10.0), (0.01, 0.1, 1.0)
PRIVATE_BETAS = (0.001, 0.01, 0.1, 1.0)
NAMES = [figure.name for figure in FIGURES]
PRIVATE = [name for name in NAMES if name.startswith("fig-dp")]
# The paper's tables, typed in independently.
PRINTED = {
    "NormEC without SN": {0.01: (0.1, 84.04), 0.1: (0.1, 86.09), 1.0: (0.1, 84.80), 10.0: (0.01, 79.25)},
    "NormEC with SN": {0.01: (0.01, 82.86), 0.1: (0.1, 85.43), 1.0: (0.1, 84.29), 10.0: (0.1, 81.48)},
    "DP-SGD, no noise": {0.01: (1.0, 51.10), 0.1: (1.0, 79.68), 1.0: (1.0, 83.89), 10.0: (0.1, 84.50)},
    "Clip21": {0.01: (0.1, 83.00), 0.1: (0.1, 85.91), 1.0: (0.1, 84.78), 10.0: (0.1, 83.19)},
}
PAIRS = {
    "ef": ("NormEC without SN", "DP-SGD, no noise"),
    "sn": ("NormEC with SN", "NormEC without SN"),
    "clip": ("Clip21", "NormEC without SN"),
}

# Records hold percentages with two decimals and losses with four.


def close(percentage: float) -> object:
    return pytest.approx(percentage, abs=0.0051)


def close_loss(loss: float) -> object:
    return pytest.approx(loss, abs=0.000051)


def difference(of_percentages: float) -> object:
    return pytest.approx(of_percentages, abs=0.0101)


def check_curve(rows: list[Row], cell: RunFiles, rounds: int) -> None:
    """Compare the rows of one curve with the history of its run."""
    assert [row["round"] for row in rows] == list(range(rounds + 1))
    for row in rows:
        assert row["accuracy"] == close(cell.accuracy(row["round"] * STEPS))
        wanted = None if row["round"] == 0 else close_loss(cell.loss(row["round"]))
        assert row["loss"] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_there_and_says_the_same(figures: SmokeFigures, name: str) -> None:
    (printed,) = (one for one in figures.printed["figures"] if one["figure"] == name)
    files = [Path(path).name for path in printed["files"]]
    assert files[:4] == [f"{name}{suffix}" for suffix in (".png", ".pdf", ".json", ".csv")]
    assert all((figures.folder / file).stat().st_size > 0 for file in files)
    assert (figures.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (figures.folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    content = figures.content(name)
    with (figures.folder / f"{name}.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in content["rows"]
    ]
    assert content["compared"] == printed["compared"]
    assert f"![{name}]({name}.png)" in (figures.folder / "index.md").read_text()
    known = {cell.folder.name.rpartition("-")[2]: cell for cell in figures.cells}
    for one in content["runs"]:
        assert json.loads((figures.folder.parent / one["record"]).read_text())["name"] == one["name"]
        assert one["name"] in known[one["digest"]].folder.name
        assert one["status"] == known[one["digest"]].summary["status"] == "finished"
        assert one["seed"] == known[one["digest"]].config["seed"] == 42


def test_each_run_is_made_once_for_all_figures(figures: SmokeFigures) -> None:
    asked = [one["digest"] for name in NAMES for one in figures.content(name)["runs"]]
    # α × β × γ, then three methods over β × γ; three private ones, and the short one
    assert len(figures.cells) == len(set(asked)) == 3 * 4 * 3 + 3 * 4 * 3 + 3 * 4 * 3 + 4 * 3
    assert len(asked) > 2 * len(figures.cells)


def test_fig_params(figures: SmokeFigures) -> None:
    rows = figures.content("fig-params")["rows"]
    assert len(rows) == len(ALPHAS) * len(BETAS) * (ROUNDS + 1)
    for alpha in ALPHAS:
        for beta in BETAS:
            cell = figures.tuned("NormEC with SN", beta, alpha)
            own = [row for row in rows if (row["alpha"], row["beta"]) == (alpha, beta)]
            assert {row["lr"] for row in own} == {cell.config["lr"]}
            check_curve(own, cell, ROUNDS)


def test_fig_heatmap(figures: SmokeFigures) -> None:
    content = figures.content("fig-heatmap")
    found = {(row["alpha"], row["beta"]): row for row in content["rows"]}
    assert set(found) == {(alpha, beta) for alpha in ALPHAS for beta in BETAS}
    for (alpha, beta), row in found.items():
        cell = figures.tuned("NormEC with SN", beta, alpha)
        assert (row["lr"], row["highest_accuracy"]) == (cell.config["lr"], close(cell.highest()))
    compared = {row["what"]: row for row in content["compared"]}
    best = max(row["highest_accuracy"] for row in content["rows"])
    assert compared["best of all"] == {"what": "best of all", "paper": 85.78, "ours": best, "difference": best - 85.78}
    column = [found[alpha, 10.0]["highest_accuracy"] for alpha in ALPHAS]
    last = compared["β = 10, mean over α"]
    assert (last["paper"], last["ours"]) == ("81–82", close(sum(column) / 3))
    assert last["difference"] == close(max(0.0, last["ours"] - 82) + min(0.0, last["ours"] - 81))


def test_fig_heatmaps_other(figures: SmokeFigures) -> None:
    content = figures.content("fig-heatmaps-other")
    assert len(content["rows"]) == len(ALPHAS) * len(BETAS)
    for row in content["rows"]:
        cell = figures.tuned("NormEC with SN", row["beta"], row["alpha"])
        losses = [cell.loss(k) for k in range(1, ROUNDS + 1)]
        assert row["minimal_loss"] == close_loss(min(losses))
        assert row["final_loss"] == close_loss(losses[-1])
        assert row["final_accuracy"] == close(100 * cell.final["accuracy"])
    assert [row["paper"] for row in content["compared"]] == [82.86, 85.43, 84.29, 81.48]


@pytest.mark.parametrize("pair", PAIRS)
def test_tables(figures: SmokeFigures, pair: str) -> None:
    content = figures.content(f"tab-{pair}")
    assert [(row["method"], row["beta"]) for row in content["rows"]] == [(m, b) for m in PAIRS[pair] for b in BETAS]
    ours = {}
    for row in content["rows"]:
        cell = figures.tuned(row["method"], row["beta"])
        ours[row["method"], row["beta"]] = 100 * cell.final["accuracy"]
        assert row["lr"] == cell.config["lr"]
        assert row["final_accuracy"] == row["test_accuracy"] == close(100 * cell.final["accuracy"])
        assert row["held_out_accuracy"] == close(100 * cell.final["validation_accuracy"])
        assert (row["paper_lr"], row["paper_accuracy"]) == PRINTED[row["method"]][row["beta"]]
    compared = iter(content["compared"])
    for method, beta in ours:
        row = next(compared)
        assert (row["what"], row["paper"]) == (f"{method}, β = {beta:g}", PRINTED[method][beta][1])
        assert row["ours"] == close(ours[method, beta])
        assert row["difference"] == pytest.approx(row["ours"] - row["paper"])
    for beta, row in zip(BETAS, compared, strict=True):
        one, other = PAIRS[pair]
        assert row["paper"] == pytest.approx(PRINTED[one][beta][1] - PRINTED[other][beta][1], abs=1e-9)
        assert row["ours"] == difference(ours[one, beta] - ours[other, beta])
        assert row["difference"] == pytest.approx(row["ours"] - row["paper"])


@pytest.mark.parametrize(
    ("name", "methods", "betas"),
    [
        *((f"fig-{pair}", methods, BETAS) for pair, methods in PAIRS.items()),
        ("fig-dp-curves", ("DP-Clip21", "DP-NormEC without SN", "DP-NormEC with SN"), PRIVATE_BETAS),
    ],
)
def test_curves(figures: SmokeFigures, name: str, methods: tuple[str, ...], betas: tuple[float, ...]) -> None:
    rows = figures.content(name)["rows"]
    assert len(rows) == len(methods) * len(betas) * (ROUNDS + 1)
    for method in methods:
        for beta in betas:
            cell = figures.tuned(method, beta)
            own = [row for row in rows if (row["method"], row["beta"]) == (method, beta)]
            assert {(row["lr"], row["digest"]) for row in own} == {
                (cell.config["lr"], cell.folder.name.rpartition("-")[2])
            }
            check_curve(own, cell, ROUNDS)


def test_fig_dp_curves_says_who_is_faster(figures: SmokeFigures) -> None:
    compared = figures.content("fig-dp-curves")["compared"]

    def mean(method: str, beta: float) -> float:
        cell = figures.tuned(method, beta)
        return sum(cell.accuracy(k * STEPS) for k in range(ROUNDS + 1)) / (ROUNDS + 1)

    leads = [mean("DP-NormEC without SN", beta) - mean("DP-Clip21", beta) for beta in (0.001, 0.1)]
    leads += [mean("DP-NormEC with SN", 1.0) - mean(other, 1.0) for other in ("DP-NormEC without SN", "DP-Clip21")]
    assert [row["ours"] for row in compared] == [difference(lead) for lead in leads]
    assert [row["difference"] for row in compared] == [difference(min(0.0, lead)) for lead in leads]


def test_fig_dp_heatmaps(figures: SmokeFigures) -> None:
    content = figures.content("fig-dp-heatmaps")
    found = {(row["method"], row["beta"], row["lr"]): row["highest_accuracy"] for row in content["rows"]}
    pairs = [(beta, lr) for beta in PRIVATE_BETAS for lr in LRS]
    assert len(found) == 3 * len(pairs)
    for pair in pairs:
        with_sn, without = (found[f"DP-NormEC {how} SN", *pair] for how in ("with", "without"))
        assert with_sn == close(figures.find("DP-NormEC with SN", *pair).highest())
        assert without == close(figures.find("DP-NormEC without SN", *pair).highest())
        assert found["difference", *pair] == with_sn - without
    ours = [row["ours"] for row in content["compared"]]
    without, with_sn = ({pair: found[f"DP-NormEC {how} SN", *pair] for pair in pairs} for how in ("without", "with"))
    assert ours[:2] == [max(without.values()), max(with_sn.values())]
    spreads = [max(abs(one[b, 0.01] - one[b, 0.1]) for b in (0.001, 0.01)) for one in (without, with_sn)]
    assert ours[2:] == [difference(spread) for spread in spreads]
    assert [row["paper"] for row in content["compared"]] == [77.56, 72.21, 40, "≤ 6"]


def test_fig_dp_clip(figures: SmokeFigures) -> None:
    rows = figures.content("fig-dp-clip")["rows"]
    assert [(row["beta"], row["lr"]) for row in rows] == [(beta, lr) for beta in PRIVATE_BETAS for lr in LRS]
    for row in rows:
        assert row["highest_accuracy"] == close(figures.find("DP-Clip21", row["beta"], row["lr"]).highest())


def test_fig_dp_150(figures: SmokeFigures) -> None:
    content = figures.content("fig-dp-150")
    name = "DP-NormEC with SN"
    for beta in PRIVATE_BETAS:
        cell = figures.tuned(name, beta, epochs=SHORT_ROUNDS)
        own = [row for row in content["rows"] if row["panel"] == "curves" and row["beta"] == beta]
        check_curve(own, cell, SHORT_ROUNDS)
    painted = [row for row in content["rows"] if row["panel"] == "heat map"]
    assert len(painted) == len(PRIVATE_BETAS) * len(LRS)
    for row in painted:
        assert row["highest_accuracy"] == close(
            figures.find(name, row["beta"], row["lr"], epochs=SHORT_ROUNDS).highest()
        )
    short, full = (
        max(figures.find("DP-NormEC with SN", 1.0, lr, epochs=epochs).highest() for lr in LRS)
        for epochs in (SHORT_ROUNDS, ROUNDS)
    )
    (compared,) = content["compared"]
    assert (compared["ours"], compared["difference"]) == (difference(short - full), difference(short - full))


@pytest.mark.parametrize("name", PRIVATE)
def test_private_figures_state_the_exact_epsilon_and_never_that_of_the_formula(
    figures: SmokeFigures, name: str
) -> None:
    content = figures.content(name)
    for one in content["runs"]:
        cell = next(cell for cell in figures.cells if cell.folder.name.endswith(one["digest"]))
        bound = one["beta"] if one["method"] == "DP-Clip21" else 1.0
        rounds = cell.config["epochs"]
        # total-variance, K counting rounds: E‖z‖² = s in units of the bound, d = 650
        sigma = bound * math.sqrt(math.sqrt(ROUNDS * math.log(1e5)) / 8 / 650)
        assert one["sigma"] == pytest.approx(sigma, rel=1e-12)
        assert one["epsilon"] == pytest.approx(exact_epsilon(math.sqrt(rounds * STEPS) * bound / sigma), rel=1e-6)
    text = "".join(path.read_text() for path in figures.folder.glob(f"{name}*.md"))
    if content["compared"]:
        epsilons = [one["epsilon"] for one in content["runs"]]
        sign = "up to" if name == "fig-dp-150" else "="  # it has runs of two lengths
        assert f"total-variance, K counting rounds: exact ε {sign} {max(epsilons):.4g} at δ = 1e-05" in text
    assert not re.search(r"(ε|epsilon) *= *8(\.0)?\b", text)


def exact_epsilon(mu: float) -> float:
    """ε of μ-GDP at δ = 1e-5, with both terms as logarithms: they are huge and tiny here."""

    def log_ratio(epsilon: float) -> float:
        first, second = norm.logcdf(mu / 2 - epsilon / mu), epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        return float(first + math.log(-math.expm1(second - first)) - math.log(1e-5))

    return float(brentq(log_ratio, mu, mu**2 / 2 + 10 * mu, xtol=1e-9))


def test_a_second_run_computes_nothing(
    figures: SmokeFigures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smoke"
    shutil.copytree(figures.folder.parent, folder)
    (folder / "figures" / "tab-sn.json").unlink()
    words = ["--runs", str(folder)]
    assert run(["figures", "all", *words, "--dry-run", "--json"], app) == 0
    assert json.loads(capsys.readouterr().out) == {"cells": len(figures.cells), "done": len(figures.cells)}
    before = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*")}
    assert run(["figures", "tab-sn", *words, "--jobs", "1"], app) == 0
    shown = capsys.readouterr()
    assert "24 of 24 cells have a record" in shown.err
    assert "NormEC with SN − NormEC without SN, β = 0.1" in shown.out
    assert json.loads((folder / "figures" / "tab-sn.json").read_text()) == figures.content("tab-sn")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*")} == before


def test_figures_at_the_papers_scale_are_drawn_from_the_committed_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["figures", "tab-ef", "--scale", "paper", "--runs", str(tmp_path), "--json", "--quiet"], app) == 0
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    assert figure["compared"][0] == {
        "what": "NormEC without SN, β = 0.01",
        "paper": 84.04,
        "ours": 87.23,
        "difference": pytest.approx(3.19),
    }
    assert not (tmp_path / "cells").exists()
