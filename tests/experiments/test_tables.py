"""Private runs on tables say whom their clients stand for, and what the records show without noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from normec.experiments.runs import execute
from normec.settings import make

SCHEMA = """
target = "ill"
classes = ["0", "1"]
centre = "clinic"

[inputs]
age = {low = 0, high = 40}
"""


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        ({"data_schema": "table.toml"}, ["the clients are simulated: split = iid dealt"]),
        ({"data_schema": "table.toml", "split": "label"}, ["the clients are simulated: split = label dealt"]),
        ({"target": "ill"}, ["the classes, and with them", "the clients are simulated: split = iid dealt"]),
        ({"data_schema": "table.toml", "split": "centre", "clients": None}, []),
        ({"data_schema": "table.toml", "unit": "record", "method": "dpsgd-clip", "public_sizes": True}, []),
    ],
)
def test_notes_say_whom_the_clients_stand_for(
    settings: dict[str, object], notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{age},{age % 2},{int(age > 20)}" for age in range(40)]
    Path("table.csv").write_text("\n".join(["age,clinic,ill", *rows]) + "\n")
    Path("table.toml").write_text(SCHEMA)
    done = execute(make({"data": "table.csv", "clients": 4, "rounds": 1, **settings}), Path("run"))
    said = [note for note in done.summary["privacy"]["notes"] if note.startswith("the cl")]
    assert len(said) == len(notes)
    assert all(note.startswith(start) for note, start in zip(said, notes, strict=True))
