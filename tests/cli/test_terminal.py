"""What commands print of the names and errors in a run's folder: on one line, nothing that steers a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normec.cli import compare, output, results, train
from normec.cli.progress import describe
from normec.experiments import runs
from normec.report.result_metrics import BY_COLUMN
from normec.settings import make
from normec.storage.history import NOT_COVERED

from .command import normec

EVIL = "\x1b]0;taken\x07[red]bold[/nothing]\u202e"


def test_tables_take_brackets_and_control_characters_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.show([(EVIL, "1")], (EVIL, ">number"), title=EVIL)
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]0;taken\\x07[red]bold[/nothing]\\u202e") == 3
    assert not set(shown) & set("\x1b\x07\u202e")


def test_rows_of_private_runs_say_what_is_not_covered() -> None:
    assert describe({"loss": 0.5, "grad_norm": 0.1}) == "loss 0.5000  ‖∇f‖ 1.00e-01"
    private = describe({"loss": 0.5, "epsilon": 2.0, "accuracy": 0.9})
    assert private == f"loss 0.5000  ({NOT_COVERED})  ε 2  accuracy 90.0 %"
    assert describe({"epsilon": 2.0, "accuracy": 0.9}) == "ε 2  accuracy 90.0 %"
    noted = results.notes_on([{"loss": 0.5, "epsilon": 8.0}])
    assert len(noted) == 1
    assert NOT_COVERED in noted[0]
    assert results.notes_on([{"loss": 0.5, "epsilon": None}, {"loss": None, "epsilon": 8.0}]) == []


def test_a_table_of_runs_that_differ_in_much_shows_what_matters_and_names_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = dict.fromkeys(BY_COLUMN) | {"accuracy": 0.5}
    shared = dict.fromkeys(("method", "data", "model", "lr", "beta", "unit", "trust", "clients"), "x")
    rare = dict.fromkeys(("shards", "concentration"))  # as for a run from Python
    rows = [{**shared, **rare, **metrics}]
    rows.append({**dict.fromkeys(shared, "y"), "shards": 1, "concentration": 0.5, **metrics})
    results.show_rows(rows)
    shown = capsys.readouterr().out
    head = shown.splitlines()[1]
    assert all(name in head for name in ("method", "data", "model", "clients", "unit", "accuracy"))
    assert not any(name in head for name in ("shards", "concentration", "beta"))
    assert "Not shown: lr, beta, shards, concentration, which differ too" in shown
    results.show_rows([{**row, "data": "x", "lr": "x", "beta": "x", "shards": 1, "concentration": 1} for row in rows])
    assert "Not shown" not in capsys.readouterr().out


@pytest.mark.parametrize("epsilon", [3.110107668399108, 12.340001, 0.00050001, 104.4])
def test_no_epsilon_is_printed_smaller_than_it_is(epsilon: float, capsys: pytest.CaptureFixture[str]) -> None:
    spent = {"epsilon": epsilon, "delta": 1e-5, "sigma": 1.0, "is_target": True}
    measured = {"method": "normec", "status": "finished", "epsilon": epsilon, "lr": 1.0, "accuracy": 0.5}
    measured |= {"loss": None, "grad_norm": None, "memory_error": None, "bytes": 1.0, "seconds": 1.0}
    compare.show_rows([measured])
    printed = [
        train.privacy_line(spent).split()[2],
        describe({"epsilon": epsilon}).split()[1],
        results._measured({"epsilon": epsilon}, "epsilon"),
        capsys.readouterr().out.splitlines()[3].split("│")[2],
    ]
    assert [float(text) for text in printed] == pytest.approx([epsilon] * 4, rel=1e-3)
    assert min(map(float, printed)) >= epsilon


@pytest.mark.slow
def test_commands_print_no_control_characters_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / f"run{EVIL.replace('/', '|')}"
    runs.execute(make({"data": "digits", "clients": 10, "rounds": 2, "private": False}), folder)
    for arguments in (("report", folder.name), ("results", folder.name, "--each")):
        done = normec(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not set(done.stdout + done.stderr) & set("\x1b\x07\u202e")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"final": EVIL}))
    broken = normec("results", folder.name, cwd=tmp_path)
    assert broken.returncode == 2
    assert "Traceback" not in broken.stderr
    assert not set(broken.stderr) & set("\x1b\x07\u202e")


@pytest.mark.slow
def test_a_private_run_prints_no_loss_unless_asked(tmp_path: Path) -> None:
    asked = ("train", "--clients", "10", "--rounds", "4")
    quiet = normec(*asked, "--out", "quiet", cwd=tmp_path)
    assert quiet.returncode == 0, quiet.stderr
    for word in ("loss", "gradient norm", "memory error", "∇f"):
        assert word not in quiet.stdout + quiet.stderr.replace("test_loss", "")
    diagnosed = normec(*asked, "--out", "diagnosed", "--diagnostics", cwd=tmp_path)
    lines = [line for line in diagnosed.stdout.splitlines() if "loss" in line or "gradient norm" in line]
    assert lines
    assert all(NOT_COVERED in line for line in lines)
    refused = normec("compare", "normec", "--lr", "0.05,0.5", "--rounds", "4", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: private runs do not record loss")
    assert "--diagnostics" in refused.stderr
    assert refused.stderr.count("\n") == 1
