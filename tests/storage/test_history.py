"""The history: rows in memory and in a file of JSON lines, which goes back to the rows of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normec import History, UsageError

ROWS = [{"round": 0, "loss": 2.5}, {"round": 1, "loss": 0.1 + 0.2, "accuracy": 0.5}, {"round": 2, "accuracy": None}]


def filled(path: Path | None = None) -> History:
    history = History(path)
    for row in ROWS:
        history.append(dict(row))
    history.write()
    return history


def test_columns_skip_rows_without_a_value() -> None:
    history = filled()
    assert history["loss"] == [2.5, 0.1 + 0.2]
    assert history.rounds("loss") == [0, 1]
    assert history["accuracy"] == [0.5]
    assert history.rounds("accuracy") == [1]
    assert history["grad_norm"] == []
    assert len(history) == 3
    assert list(history) == ROWS


def test_the_file_holds_the_rows_to_the_bit(tmp_path: Path) -> None:
    history = filled(tmp_path / "m.jsonl")
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS == history.rows
    assert history.flush()["bytes"] == (tmp_path / "m.jsonl").stat().st_size


def test_rows_wait_for_the_write(tmp_path: Path) -> None:
    history = History(tmp_path / "m.jsonl")
    history.append({"round": 0})
    assert history.rows == [{"round": 0}]
    assert list(tmp_path.iterdir()) == []
    assert history.flush()["bytes"] == (tmp_path / "m.jsonl").stat().st_size > 0


def test_no_row_no_file(tmp_path: Path) -> None:
    history = History(tmp_path / "m.jsonl")
    assert history.flush()["bytes"] == 0
    history.rewind(None)
    assert list(tmp_path.iterdir()) == []
    memory_only = History()
    memory_only.append({"round": 0})
    assert memory_only.flush()["bytes"] == 0


@pytest.mark.parametrize("torn", [b"", b'{"round": 3, "lo', b'{"round": 3}\n', b"\xff\xfe\n"])
def test_rewinding_drops_what_came_after(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    good = filled(path).flush()
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(torn)
    history = History(path)
    history.rewind(good)
    assert history.rows == ROWS
    assert path.read_bytes() == before
    history.append({"round": 3})
    history.write()
    assert json.loads(path.read_text().splitlines()[-1]) == {"round": 3}


@pytest.mark.parametrize("torn", [b"", b'{"round": 3, "lo'])
def test_rereading_leaves_out_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    filled(path)
    path.write_bytes(path.read_bytes() + torn)
    history = History(path)
    history.reread()
    assert history.rows == ROWS


@pytest.mark.parametrize("line", [b"#\n", b"[1]\n"])
def test_rereading_refuses_a_line_that_is_no_row(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    filled(path)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UsageError, match="is damaged") as error:
        History(path).reread()
    assert str(path) in str(error.value)


@pytest.mark.parametrize("damage", ["shorter", "missing", "moved lines", "no JSON", "another number"])
def test_a_file_changed_by_hand_is_refused_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.jsonl"
    good = filled(path).flush()
    if damage == "shorter":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "missing":
        path.unlink()
    elif damage == "moved lines":
        path.write_bytes(b'{"round": 0}\n' + path.read_bytes())
    elif damage == "no JSON":
        path.write_bytes(b"#" + path.read_bytes()[1:])
    else:
        path.write_bytes(path.read_bytes().replace(b"2.5", b"9.5"))
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(UsageError, match="edited or damaged") as error:
        History(path).rewind(good)
    assert str(path) in str(error.value)
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_misspelt_column_is_refused_and_one_that_was_not_measured_is_empty(tmp_path: Path) -> None:
    history = filled(tmp_path / "m.jsonl")
    assert history["test_loss"] == []
    with pytest.raises(UsageError, match="no column 'acuracy', did you mean 'accuracy'"):
        history["acuracy"]
    assert History()["anything"] == []
