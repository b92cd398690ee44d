"""Tags of runs: what is added, removed, refused, and left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normec.errors import UsageError
from normec.storage.tags import FILE, change_tags, read_tags


def test_tags_are_added_once_and_removed(tmp_path: Path) -> None:
    assert read_tags(tmp_path) == []
    assert change_tags(tmp_path, remove=["absent"]) == []
    assert not (tmp_path / FILE).exists()
    assert change_tags(tmp_path, ["paper", "größer", "paper"]) == ["paper", "größer"]
    assert change_tags(tmp_path, ["v1.2"], ["paper"]) == ["größer", "v1.2"]
    assert json.loads((tmp_path / FILE).read_text(encoding="utf-8")) == read_tags(tmp_path) == ["größer", "v1.2"]
    assert change_tags(tmp_path, remove=["größer", "v1.2"]) == read_tags(tmp_path) == []


@pytest.mark.parametrize("tag", ["", "two words", "a,b", "<b>", "x" * 41, "line\n"])
def test_other_characters_are_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a tag has 1 to 40"):
        change_tags(tmp_path, ["good", tag])
    assert read_tags(tmp_path) == []


def test_too_many_tags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 50"):
        change_tags(tmp_path, [f"tag{k}" for k in range(51)])


@pytest.mark.parametrize("text", ["{}", '"baseline"', "[1]", '["two words"]', "[", "null"])
def test_a_damaged_file_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError, match=FILE):
        read_tags(tmp_path)
    with pytest.raises(UsageError, match=FILE):
        change_tags(tmp_path, ["new"])
    assert (tmp_path / FILE).read_text() == text
