"""The commands of the privacy benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.privacy.__main__ import app
from normec.cli.app import run


@pytest.mark.slow
def test_methods_are_tuned_alike_and_a_stopped_table_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["table", "--epsilon", "8", "--split", "iid", "--clients", "20", "--trials", "1"]
    words += ["--processes", "1", "--out", str(tmp_path / "t")]
    assert run(words, app) == 0
    first = capsys.readouterr()
    assert first.err.count("ε = 8") == 6
    cells = [json.loads(line) for line in (tmp_path / "t/cells.jsonl").read_text().splitlines()]
    assert len({cell["method"] for cell in cells}) == 6
    assert all(len(cell["accuracies"]) == 3 and cell["trials"] == 1 for cell in cells)
    assert "| NormEC, forgetting |" in first.out
    cells[3] |= {"chosen": {**cells[3]["chosen"], "lr": 123.0}, "accuracy": 0.99}  # of settings that are not tried
    (tmp_path / "t/cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells[:4]))
    assert run(words, app) == 0
    again = capsys.readouterr()
    assert again.err.count("ε = 8") == 3
    assert again.out == first.out
