"""normec tag: tags are added, shown and removed, and mistakes are answered in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normec.cli.app import run
from normec.report import page
from normec.storage.tags import read_tags


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, as small as one can be."""
    made = tmp_path / "run"
    made.mkdir()
    (made / "metrics.jsonl").write_text('{"round": 0, "loss": 1.0}\n')
    return made


def test_tags_are_added_printed_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tag", str(folder), "--add", "baseline", "--add", "v2"]) == 0
    assert capsys.readouterr().out == f"{folder}: baseline, v2\n"
    assert '<span class="tag" title="tag">baseline</span>' in page.write(folder).read_text()
    assert run(["tag", str(folder), "--remove", "baseline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {str(folder): ["v2"]}
    assert run(["tag", str(folder), "--remove", "v2"]) == 0
    assert run(["tag", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(": no tags\n")


def test_mistakes_change_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(folder), "--add", "two words"], [str(folder), str(tmp_path / "none"), "--add", "x"]):
        assert run(["tag", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
    assert read_tags(folder) == []


def test_a_run_is_tagged_when_it_begins_and_a_finished_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--rounds", "2", "--out", "run", "--quiet"]
    assert run([*words, "--tag", "two words"]) == 2
    assert capsys.readouterr().err.startswith("error: a tag has 1 to 40 letters")
    assert list(tmp_path.iterdir()) == []
    assert run([*words, "--tag", "baseline", "--tag", "v2"]) == 0
    assert read_tags(Path("run")) == ["baseline", "v2"]
    assert '<span class="tag" title="tag">baseline</span>' in Path("run/report.html").read_text()
    assert run([*words, "--tag", "again"]) == 0
    assert read_tags(Path("run")) == ["baseline", "v2", "again"]
