"""The commands of the privacy benchmark."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from benchmarks.privacy import heart, runner
from benchmarks.privacy.__main__ import app
from benchmarks.privacy.studies import STUDIES
from normec.cli.app import run

pytestmark = pytest.mark.slow
OWN = """
from benchmarks.privacy.contenders import Contender
from benchmarks.privacy.studies import Study
from benchmarks.privacy.tuning import TuningBudget

MINE = Study(
    "mine",
    "softmax regression on digits, 20 clients",
    {"data": "digits", "clients": 20},
    TuningBudget(1, (0,), (2, 3), rounds=(3,)),
    epsilons=(8.0,),
    splits=("iid",),
    contenders=("DP-SGD, norm", "longer"),
    own={"longer": Contender("dpsgd-norm", "plain", {"lr": (0.5, 0.6)})},
)
"""


def test_a_study_and_a_method_of_the_users_own_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ["run", f"{tmp_path / 'own.py'}:MINE", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert run(words, app) == 0
    first = capsys.readouterr()
    assert "2 of 2 cells are left, less than a minute" in first.err
    assert "| longer | " in first.out
    held = (tmp_path / "out/records/mine.jsonl").read_text().splitlines()
    assert [json.loads(one)["method"] for one in held] == ["DP-SGD, norm", "longer"]
    gaps = np.subtract(*(json.loads(one)["accuracies"] for one in held))
    least = t.ppf(0.975, 1) * gaps.std(ddof=1) / np.sqrt(2)  # of two methods, Tukey's test is the paired t-test
    assert f"| significant difference | {100 * least:.1f} |" in first.out
    (tmp_path / "out/records/mine.jsonl").write_text(held[0] + "\n")
    assert run(words, app) == 0
    again = capsys.readouterr()
    assert again.err.count("ε = 8") == 1  # what has a record is not run again
    assert again.out == first.out
    words[1:4] = [f"{words[1]}/iid/8/longer", "--out", str(tmp_path / "one")]
    assert run(words, app) == 0
    assert "1 of 1 cells are left, less than a minute" in capsys.readouterr().err
    held = (tmp_path / "one/records/mine.jsonl").read_text().splitlines()
    assert [json.loads(one)["method"] for one in held] == ["longer"]


def test_the_list_says_what_has_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json", "--out", str(tmp_path)], app) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["study"] for row in rows] == list(STUDIES)
    assert all(row["run"] == 0 and row["seconds_left"] > 0 for row in rows)
    assert run(["list"], app) == 0
    shown = capsys.readouterr().out
    assert "a9a-100" in shown
    assert re.search(r"heart-disease +(\d+) of +\1 cells +finished", shown)


def test_page_writes_both_pages_and_all_includes_the_hospitals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "records"
    inner.mkdir()
    for name in ("a9a-100.jsonl", heart.RECORD.name):
        shutil.copy(heart.RECORD.parent / name, inner)
    assert run(["page", "--no-picture", "--out", str(tmp_path)], app) == 0
    assert (tmp_path / heart.PAGE.name).read_text(encoding="utf-8") == heart.page(heart.read())
    capsys.readouterr()
    ran: list[Path] = []
    monkeypatch.setattr(heart, "run", lambda _processes, _report, path: ran.append(path))
    monkeypatch.setattr(runner, "run", lambda *_: True)
    assert run(["run", "all", "--out", str(tmp_path)], app) == 0
    assert ran == [inner / heart.RECORD.name]


def test_mistakes_are_answered_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "a9a-10", "--out", str(tmp_path)], app) != 0
    assert "a9a-100" in capsys.readouterr().err
    assert run(["page", "--out", str(tmp_path)], app) == 2
    assert (
        "no records of the studies that this page shows; the table of a study of your own is" in capsys.readouterr().err
    )
    (tmp_path / "own.py").write_text("MINE = 3\n")
    assert run(["run", f"{tmp_path / 'own.py'}:MINE", "--out", str(tmp_path)], app) != 0
    assert "must be a benchmarks.privacy.studies.Study, got int" in capsys.readouterr().err
    for number, (right, wrong, said) in enumerate(
        (
            ('"DP-SGD, norm", "l', '"DP-SGD, nrom", "l', "nor described in own, did you mean 'DP-SGD, norm'?"),
            ("(0.5, 0.6)", '"stepz"', "the range of lr must be two bounds, a list of choices, or a role (steps"),
            ('"clients": 20', '"clients": 20, "rounds": 30', "got rounds = 30 in the settings; give the choices to"),
        )
    ):
        assert right in OWN
        (tmp_path / f"wrong{number}.py").write_text(OWN.replace(right, wrong))
        assert run(["run", f"{tmp_path / f'wrong{number}.py'}:MINE", "--out", str(tmp_path)], app) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
