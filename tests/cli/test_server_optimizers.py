"""Server optimizers, schedules and averages on the command line: in a run, in a comparison, and wrong ones."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from normec.cli.app import run

SMALL = ["--clients", "5", "--rounds", "6", "--seed", "1", "--quiet"]


def test_a_run_by_assignments_and_by_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["server_optimizer=adam", "server_optimizer_settings=betas=[0.8,0.9]", "lr_schedule=cosine", "lr=0.02"]
    chosen += ["lr_schedule_settings=ramp_up=2,end=0.5", "averaging=ema", "averaging_decay=0.5"]
    assert run(["train", *SMALL, "--out", "a", *(word for one in chosen for word in ("--set", one))]) == 0
    held = tomllib.loads(Path("a/config.toml").read_text())
    assert held["lr"] == 0.02
    assert held["server_optimizer_settings"] == "betas=[0.8, 0.9],eps=1e-08,weight_decay=0"
    assert held["lr_schedule_settings"] == "end=0.5,ramp_up=2"
    assert (held["averaging"], held["averaging_decay"], held["averaging_start"]) == ("ema", 0.5, 0)
    assert json.loads(Path("a/summary.json").read_text())["config"] == held
    assert run(["train", "a/config.toml", "--out", "b", "--quiet"]) == 0
    assert Path("a/metrics.jsonl").read_text() == Path("b/metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_comparison_of_optimizers(tmp_path: Path) -> None:
    methods = ["clip21", "clip21:server_optimizer=nesterov", "clip21:server_optimizer=adam,lr=0.01"]
    methods += ["clip21:server_optimizer=sgd,server_optimizer_settings=momentum=0.5", "clip21:averaging=polyak"]
    assert run(["compare", *methods, *SMALL, "--out", str(tmp_path / "c")]) == 0
    rows = json.loads((tmp_path / "c/comparison.json").read_text())
    plain = rows[0]["lr"]
    assert [row["lr"] for row in rows] == pytest.approx([plain, 0.1 * plain, 0.01, 0.5 * plain, plain])
    assert len({row["test_loss"] for row in rows}) == len(rows)
    assert len({row["epsilon"] for row in rows}) == 1, "none costs privacy"


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["server_optimizer=adm"], "unknown server_optimizer 'adm'"),
        (["server_optimizer=adam", "server_optimizer_settings=beta=1"], "adam has no setting 'beta'"),
        (["server_optimizer=adam", "server_optimizer_settings=lr=1"], "lr is not a setting of adam"),
        (["server_optimizer=adam", "server_optimizer_settings=eps=-1"], "adam cannot step along a direction"),
        (["server_optimizer=adagrad"], "lr must be given"),
        (["server_optimizer=adambc"], "not known for normec"),
        (["server_optimizer_settings=eps=1"], "goes with server_optimizer, which is not given"),
        (["lr_schedule=ReduceLROnPlateau"], "reads what the run measures"),
        (["lr_schedule_settings=end=1"], "goes with lr_schedule, which is not given"),
        (["averaging_decay=0.5"], "goes with averaging, which is not given"),
        (["averaging=polyak", "averaging_decay=0.5"], "for averaging='ema'"),
        (["averaging=polyak", "averaging_start=7"], "averaging_start must be at most the number of rounds, 6"),
    ],
)
def test_mistakes_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], assignments: list[str], words: str
) -> None:
    given = [word for one in assignments for word in ("--set", one)]
    assert run(["train", *SMALL, "--out", str(tmp_path / "run"), *given]) != 0
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
