"""Methods of the user's own on the command line: from a file, and from an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normec.report.run_view import read_run

from ..support.forks import ENVIRONMENT
from ..support.waiting import LIMIT
from .command import COMMAND, normec

METHOD = Path(__file__).parents[1] / "federation" / "methods" / "my_method.py"
FILE = f"{METHOD}:Clip21SGDM"
SMALL = ["--clients", "5", "--rounds", "4", "--seed", "0", "--quiet"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that offers the same class by an entry point."""
    site = tmp_path / "site"
    facts = site / "momentum-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "momentum.py").write_text(METHOD.read_text(encoding="utf-8"))
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: momentum\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[normec.methods]\nclip21-sgdm = momentum:Clip21SGDM\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))
    return tmp_path


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [[], ["--no-privacy"]], ids=["private", "plain"])
def test_a_class_in_a_file_trains_and_goes_on(privacy: list[str], tmp_path: Path) -> None:
    words = ["train", "--method", FILE, "--set", "tau=0.2", "--set", "eta=0.4", "--lr", "0.5", *SMALL, *privacy]
    assert normec(*words, "--out", "run", cwd=tmp_path).returncode == 0
    first = summary(tmp_path / "run")
    assert first["status"] == "finished"
    assert normec(*words, "--out", "run", cwd=tmp_path).returncode == 0
    assert summary(tmp_path / "run") == first
    other = normec(*words, "--set", "eta=0.5", "--out", "run", cwd=tmp_path)
    assert other.returncode == 2
    assert "method_settings" in other.stderr


@pytest.mark.slow
def test_an_installed_package_s_method_is_known_by_its_name(installed: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.environ["PYTHONPATH"]}
    words = ["train", "--method", "clip21-sgdm", "--set", "eta=0.4", "--lr", "0.5", *SMALL, "--out", "run"]
    done = subprocess.run(
        [*COMMAND, *words], cwd=installed, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert summary(installed / "run")["status"] == "finished"


@pytest.mark.slow
def test_it_is_compared_beside_others(tmp_path: Path) -> None:
    done = normec("compare", "normec", f"{FILE},tau=0.2,lr=0.5", *SMALL, "--out", "both", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["status"] for row in json.loads((tmp_path / "both" / "comparison.json").read_text())} == {"finished"}
    views = [read_run(path.parent) for path in (tmp_path / "both").glob("*/summary.json")]
    assert [view.method_settings for view in views if view.method == FILE] == [{"eta": 0.3, "tau": 0.2}]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "nowhere.py:Mine", "--lr", "1"], "there is no file nowhere.py"),
        (["--method", f"{METHOD}:Nobody", "--lr", "1"], "has no class Nobody"),
        (["--method", f"{METHOD}:Clip", "--lr", "1"], "must be a subclass of normec.Method"),
        (["--method", FILE, "--lr", "1", "--set", "tua=1"], "has no setting 'tua'"),
        (["--method", FILE], "lr must be given"),
        (["--method", FILE, "--lr", "1", "--alpha", "1"], "alpha does not apply"),
    ],
)
def test_mistakes_are_said_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = normec("train", *words, *SMALL, "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
