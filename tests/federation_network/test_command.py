"""`normec federation local` as a user runs it, interrupted, killed and run again; nothing may be left running."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from normec import load
from normec.cli.app import run

from ..support.waiting import LIMIT, wait_for
from .local_command import arguments, forked, running, started

pytestmark = pytest.mark.slow


def test_ctrl_c_while_starting_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path / "run")
    wait_for(lambda: (tmp_path / "run" / "federation" / "logs" / "superlink.log").exists(), "the SuperLink to start")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, errors
    assert not running(tmp_path / "run")


def two_tables(tmp_path: Path) -> tuple[str, ...]:
    """Write an app for tables and the tables of two parties; returns the arguments that train on them."""
    (tmp_path / "schema.toml").write_text(
        'target = "ill"\nclasses = ["no", "yes"]\n[inputs]\nage = {low = 20, high = 80}\n'
    )
    assert run(["federation", "init", str(tmp_path / "app"), "--table", str(tmp_path / "schema.toml")]) == 0
    tables = []
    for name, rows in (("north", "80,yes\n30,no\n"), ("south", "70,yes\n20,no\n40,no\n")):
        (tmp_path / f"{name}.csv").write_text(f"age,ill\n{rows}")
        tables += ["--table", str(tmp_path / f"{name}.csv")]
    return ("--app", str(tmp_path / "app"), *tables, "--rounds", "1")


def test_ctrl_c_once_a_run_of_two_tables_is_over_leaves_it_finished(tmp_path: Path) -> None:
    """The server has written its summary, and the command has not noticed yet. Each party has read its own table."""
    process, path = forked(tmp_path / "run", data=two_tables(tmp_path)), tmp_path / "run" / "summary.json"
    wait_for(lambda: path.exists() or process.poll() is not None, "the summary")
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    assert json.loads(printed)["status"] == json.loads(path.read_text())["status"] == "finished"
    assert json.loads(path.read_text())["privacy"]["epsilon"] > 0
    assert json.loads(printed)["clients"] == 2
    assert sum(one.numel() for one in load(path.parent).tensors.values()) == 4  # the model: an input, two classes
    assert not running(tmp_path / "run")


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    process = forked(tmp_path / "run", "--parties", "1", "--no-privacy", "--set", "lr=1e42")  # past the largest float32
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"


def test_killed_and_run_again_with_flowers_own_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, twice = tmp_path / "run", ("--rounds", "2")
    process = started(out, *twice)
    rows = out / "metrics.jsonl"
    wait_for(lambda: (rows.exists() and b"\n" in rows.read_bytes()) or process.poll() is not None, "the first row")
    assert process.poll() is None, process.communicate()[1]
    process.kill()
    process.communicate(timeout=LIMIT)
    wait_for(lambda: not running(out), "every process of a killed federation to end")

    again = started(out, *twice, "--flower-nodes")
    printed, errors = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, errors
    summary = json.loads(printed)
    assert (summary["status"], summary["round"]) == ("finished", 2)
    assert [json.loads(line)["round"] for line in rows.read_text().splitlines()] == [0, 1, 2]
    assert summary["privacy"]["epsilon"] <= 8
    assert not running(out)
    assert run(["federation", "ledger", str(out / "federation" / "parties" / "party-1"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["releases"] >= 2


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--set", "trust=secure-sum"), "a secure sum has at least 3 parties"),
        (("--set", "roundz=3"), "did you mean 'rounds'"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    tmp_path: Path, more: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments(tmp_path / "run"), *more]) == 2
    assert word in capsys.readouterr().err
    assert not (tmp_path / "run" / "federation" / "logs").exists()
