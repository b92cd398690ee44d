"""The comparison on ten clients with one digit each: what the paper says error feedback is for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from normec import LocalSteps
from normec.algorithms.catalogue import CATALOGUE, PRIVATE_METHODS
from normec.cli import app
from normec.errors import UsageError
from normec.experiments import compare, methods, runs
from normec.report import comparison_page
from normec.report.result_metrics import BY_COLUMN
from normec.report.run_view import read_run
from normec.settings import load, make
from normec.storage.history import NOT_COVERED
from normec.training.callbacks import Callback

DEMONSTRATION = Path(__file__).parents[2] / "examples" / "digits.toml"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, compare.Outcome]:
    settings = load(DEMONSTRATION).model_dump(exclude_unset=True)
    entries = compare.candidates(
        ["normec", "normec:server_norm=false", "clip21", "dpsgd-norm", "dpsgd-clip", "gd"], settings, [0.05, 1.0]
    )
    folder = tmp_path_factory.mktemp("compare")
    found = compare.run(entries, folder, lambda _: Callback(), "grad_norm")
    compare.write(found, folder)
    return {outcome.label: outcome for outcome in found}


def final(outcome: compare.Outcome, column: str) -> float:
    assert outcome.best is not None
    return float(outcome.best.summary["final"][column])


@pytest.mark.slow
def test_error_feedback_reaches_a_small_gradient_where_direct_methods_stall(
    outcomes: dict[str, compare.Outcome],
) -> None:
    exact = final(outcomes["gd"], "grad_norm")
    for direct in ("dpsgd-norm", "dpsgd-clip"):
        assert final(outcomes[direct], "grad_norm") > 20 * exact
    for repaired in ("clip21", "normec:server_norm=false"):
        assert final(outcomes[repaired], "grad_norm") < 3 * exact
    assert final(outcomes["normec"], "grad_norm") < final(outcomes["dpsgd-norm"], "grad_norm") / 4
    assert final(outcomes["normec"], "accuracy") > final(outcomes["dpsgd-norm"], "accuracy") + 0.03


@pytest.mark.slow
def test_direct_methods_stall_for_good(outcomes: dict[str, compare.Outcome]) -> None:
    """No progress in the second half of the run: a bias, not slowness."""
    best = outcomes["dpsgd-norm"].best
    assert best is not None
    norms = best.history["grad_norm"]
    assert norms[-1] > 0.8 * norms[len(norms) // 2]


@pytest.mark.slow
def test_the_best_step_size_is_the_one_with_the_smallest_criterion(outcomes: dict[str, compare.Outcome]) -> None:
    for outcome in outcomes.values():
        tried = {lr: value for lr, value in outcome.tried.items() if value is not None}
        assert outcome.best is not None
        assert outcome.best.summary["config"]["lr"] == min(tried, key=lambda lr: tried[lr])


@pytest.mark.slow
def test_table_and_picture_hold_what_was_run(outcomes: dict[str, compare.Outcome]) -> None:
    best = outcomes["gd"].best
    assert best is not None
    folder = best.folder.parent
    rows = {row["method"]: row for row in json.loads((folder / "comparison.json").read_text())}
    assert rows["gd"]["grad_norm"] == final(outcomes["gd"], "grad_norm")
    assert rows.keys() == outcomes.keys()
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_settings_of_one_method_are_not_forced_on_another() -> None:
    entries = {
        e.label: e for e in compare.candidates(["normec", "gd"], {"alpha": 0.5, "rounds": 7, "private": False}, [0.1])
    }
    assert entries["normec"].cells[0].alpha == 0.5
    assert entries["gd"].cells[0].alpha is None
    assert entries["gd"].cells[0].rounds == 7


def test_a_method_without_noise_takes_no_setting_of_the_private_ones() -> None:
    private, plain = compare.candidates(["normec", "gd:private=false"], {"epsilon": 3.0, "trust": "local", "rounds": 7})
    assert (private.cells[0].epsilon, private.cells[0].trust) == (3.0, "local")
    assert (plain.cells[0].epsilon, plain.cells[0].rounds) == (None, 7)
    for spec, shared in (("gd:private=false,epsilon=3", {}), ("gd", {"private": False, "epsilon": 3.0})):
        with pytest.raises(UsageError, match="epsilon is for private runs, but private = false"):
            compare.candidates(["normec", spec], shared)


def test_what_cannot_be_compared_is_refused_before_the_first_run() -> None:
    with pytest.raises(UsageError, match="compare it as gd:private=false"):
        compare.candidates(["normec", "gd"], {})
    with pytest.raises(UsageError, match="tau applies to none"):
        compare.candidates(["normec", "dpsgd-norm"], {"tau": 0.1})
    named = [entry.label for entry in compare.candidates([], {})]
    assert named == ["normec", "clip21", "dpsgd-norm", "dpsgd-clip"]
    assert "gd" in [entry.label for entry in compare.candidates([], {"private": False})]


@pytest.mark.slow
def test_every_method_of_the_catalogue_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [name if name in PRIVATE_METHODS else f"{name}:private=false" for name in CATALOGUE]
    size = ["--clients", "3", "--rounds", "1", "--set", "records=60", "--set", "test_records=20"]
    command = ["compare", *words, *size, "--seed", "0", "--quiet", "--json"]
    assert app.run([*command, "--out", str(tmp_path / "runs")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"].partition(":")[0] for row in rows] == list(CATALOGUE)
    assert all(row["status"] == "finished" for row in rows)


def test_nothing_but_divergence_is_a_table_too(tmp_path: Path) -> None:
    entries = compare.candidates(["gd"], {"model": "mlp", "rounds": 30, "private": False, "clients": 10}, [1e30])
    outcomes = compare.run(entries, tmp_path, lambda _: Callback())
    table, _ = compare.write(outcomes, tmp_path)
    assert json.loads(table.read_text())[0]["status"] == "diverged"


def test_a_diverging_step_size_is_recorded_and_passed_over(tmp_path: Path) -> None:
    entries = compare.candidates(["gd"], {"model": "mlp", "rounds": 30, "private": False, "clients": 10}, [0.1, 1e30])
    (outcome,) = compare.run(entries, tmp_path, lambda _: Callback())
    assert outcome.tried[1e30] is None
    assert outcome.best is not None
    assert outcome.best.summary["config"]["lr"] == 0.1


def test_settings_of_local_steps_go_to_the_methods_that_make_them() -> None:
    entries = compare.candidates(["normec", "fedavg", "fed-normec:local_lr=0.5"], {"local_lr": 0.2, "private": False})
    assert [entry.cells[0].local_lr for entry in entries] == [None, 0.2, 0.5]
    everyone = compare.candidates(["normec", "fedavg"], {"local_steps": 3, "local_lr": 0.2})
    assert [methods.local_steps(entry.cells[0]) for entry in everyone] == [
        LocalSteps(steps=3, lr=0.2),
        LocalSteps(steps=3, lr=0.2, scale="difference"),
    ]
    with pytest.raises(UsageError, match="local_lr is for local steps"):
        compare.candidates(["normec", "clip21"], {"local_lr": 0.2})
    with pytest.raises(UsageError, match="local_lr must be given: clip21"):
        compare.candidates(["clip21"], {"local_steps": 2})


@pytest.mark.parametrize(
    ("text", "name", "own"),
    [
        ("normec:beta=1,server_norm=false", "normec", {"beta": 1, "server_norm": False}),
        ("a/my.py:Mine", "a/my.py:Mine", {}),
        ("a/my.py:Mine:tau=0.1,lr=2", "a/my.py:Mine", {"tau": 0.1, "lr": 2}),
        ("a/my.py:Mine,tau=0.1,lr=2", "a/my.py:Mine", {"tau": 0.1, "lr": 2}),
    ],
)
def test_settings_follow_the_name_of_a_method_or_of_a_class_in_a_file(
    text: str, name: str, own: dict[str, float]
) -> None:
    assert methods.split_name(text) == (name, own)


@pytest.mark.slow
def test_several_seeds_are_means_of_runs_with_these_seeds(tmp_path: Path) -> None:
    settings = {"private": False, "rounds": 4, "clients": 4, "records": 60, "test_records": 40, "seed": 5}
    entries = compare.candidates(["normec", "clip21"], settings, [0.1, 0.5])
    found = compare.run(entries, tmp_path / "compared", lambda _: Callback(), "grad_norm", seeds=3)
    compare.write(found, tmp_path / "compared")
    for outcome in found:
        assert outcome.best is not None
        lr = outcome.best.summary["config"]["lr"]
        values = []
        for seed in (5, 6, 7):
            config = make({**settings, "method": outcome.label, "lr": lr, "seed": seed})
            values.append(runs.execute(config, tmp_path / f"{outcome.label}-{seed}").summary["final"]["loss"])
        row = compare.row(outcome)
        assert row["seeds"] == 3
        assert row["loss"] == pytest.approx(np.mean(values), rel=1e-12)
        assert row["deviations"]["loss"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
        assert len(set(values)) == 3
    page = (tmp_path / "compared" / "report.html").read_text()
    row = compare.row(found[0])
    assert "Means over 3 seeds" in page
    assert f"{100 * row['accuracy']:.1f} ± {100 * row['deviations']['accuracy']:.1f} %" in page
    assert "--seeds 3" in page


@pytest.mark.slow
def test_means_of_private_runs_that_no_noise_covers_are_marked(tmp_path: Path) -> None:
    entries = compare.candidates(["normec"], {"rounds": 3, "clients": 10, "seed": 0, "diagnostics": True})
    compare.write(compare.run(entries, tmp_path, lambda _: Callback(), seeds=2), tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    heads = re.findall(r"<th\b[^>]*>(?:<[^>]*>)*([^<]+)", text[text.index('aria-label="Means over seeds"') :])
    assert {f"training loss ({NOT_COVERED})", f"gradient norm ({NOT_COVERED})", "test accuracy"} <= set(heads)


def test_a_number_of_seeds_below_one_is_refused(tmp_path: Path) -> None:
    entries = compare.candidates(["normec"], {"private": False, "rounds": 2}, None)
    with pytest.raises(UsageError, match="seeds must be a whole number >= 1, got 0"):
        compare.run(entries, tmp_path, lambda _: Callback(), seeds=0)


@pytest.mark.slow
def test_the_page_names_the_criterion_that_chose(tmp_path: Path) -> None:
    """For every criterion of the command; the runs of the first are used again."""
    shared = {"data": "heart-disease", "rounds": 3, "private": False, "validation": 0.2, "tau": 0.5}
    entries = compare.candidates(["clip21"], shared, [0.05, 0.5])
    for by, column in compare.CRITERIA.items():
        (outcome,) = compare.run(entries, tmp_path, lambda _: Callback(), by)
        compare.write([outcome], tmp_path)
        text = (tmp_path / "report.html").read_text(encoding="utf-8").replace("\u2011", "-")
        assert f"The {BY_COLUMN[column].title} at the end" in text
        assert (f"--by {column}" in text) == (column != "loss")
        better = max if "accuracy" in column else min
        assert outcome.best is not None
        best = outcome.best.summary["config"]["lr"]
        assert outcome.tried[best] == better(outcome.tried.values())


def test_the_page_of_a_table_that_names_no_criterion_finds_it_in_the_results(tmp_path: Path) -> None:
    shared = {"clients": 10, "rounds": 3, "private": False}
    outcomes = compare.run(compare.candidates(["gd"], shared, [0.1, 0.5]), tmp_path, lambda _: Callback(), "grad_norm")
    table, _ = compare.write(outcomes, tmp_path)
    rows = json.loads(table.read_text())
    table.write_text(json.dumps([{name: value for name, value in row.items() if name != "by"} for row in rows]))
    assert "The gradient norm at the end" in comparison_page.render(tmp_path)


def test_what_a_label_says_is_not_shared_even_if_it_names_a_file_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = "import normec\n\n\nclass Mine(normec.Method):\n    def message(self, update, state, key=None):\n"
    (tmp_path / "mine" / "own.py").write_text(text + "        return update, state\n")
    label = f"{tmp_path}/mine/own.py:Mine:warmup=1"
    entries = compare.candidates([label], {"clients": 10, "rounds": 2, "private": False}, [0.1])
    (outcome,) = compare.run(entries, tmp_path / "out", lambda _: Callback())
    assert outcome.best is not None
    shared = comparison_page.shared_by_all([label], [read_run(outcome.best.folder)], tmp_path / "out")
    assert shared["rounds"] == 2
    assert "warmup" not in shared
