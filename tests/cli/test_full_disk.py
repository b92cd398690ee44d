"""A disk that is full or cannot be written: one line that names the path, and a run that goes on when there is room."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from normec.cli.app import run as command

from ..support.runs import results

WORDS = ["--rounds", "3", "--clients", "5", "--quiet", "--set", "checkpoint_seconds=0.0"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave so many bytes on the disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - left))
    return ballast


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Exit code 1 or 2 and one line."""
    capsys.readouterr()
    code = command(list(arguments))
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    return said


PAGE = 4096


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_run_on_a_disk_that_is_full_goes_on_when_there_is_room(
    disk: Path, tmp_path: Path, noise: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With more and more pages left, until the run fits: each stops at another write."""
    words = ["train", *WORDS, "--seed", "0", "--set", f"noise={noise}"]
    assert command([*words, "--out", str(tmp_path / "whole")]) == 0
    expected = results(tmp_path / "whole")
    stopped = 0
    for pages in (0, 1, 2, 4, 6, 8, 10, 12, 15, 20, 40, 600):
        ballast, out = fill(disk, pages * PAGE), disk / f"run-{pages}"
        capsys.readouterr()
        code = command([*words, "--out", str(out)])
        said = capsys.readouterr().err
        ballast.unlink()
        if code == 0:
            break
        stopped += 1
        assert code in (1, 2), said
        assert said.count("\n") == 1, said
        assert str(out) in said
        assert "No space left" in said
        assert command([*words, "--out", str(out)]) == 0, capsys.readouterr().err
        if noise == "seeded":
            assert results(out) == expected, pages
        else:
            paid = [json.loads(line)["round"] for line in (out / "ledger.jsonl").read_text().splitlines()[1:]]
            assert len(paid) - len(set(paid)) <= 1, "more than the round under way was paid for again"
        assert not list(out.rglob("*.part"))
        subprocess.run(["rm", "-r", str(out)], check=True)
    assert stopped > 4
    assert code == 0, "the last of them had room enough"


@pytest.mark.slow
def test_comparisons_sweeps_tables_and_pages_say_it_too(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert command(["train", *WORDS, "--no-privacy", "--out", str(run)]) == 0
    grid = tmp_path / "grid.toml"
    grid.write_text("rounds = 2\nclients = 5\nprivate = false\n[grid]\nseed = [0, 1]\n")
    ballast = fill(disk, 0)
    for arguments in (
        ["report", str(run), "--out", str(disk / "page.html")],
        ["results", str(run), "--format", "csv", "--out", str(disk / "table.csv")],
        ["results", str(run), "--format", "parquet", "--out", str(disk / "table.parquet")],
        ["compare", "gd", "--set", "rounds=2", "--set", "clients=5", "--no-privacy", "--out", str(disk / "compared")],
        ["sweep", str(grid), "--out", str(disk / "swept"), "--jobs", "1"],
    ):
        assert str(disk) in fails(capsys, *arguments)
    ballast.unlink()
    assert command(["sweep", str(grid), "--out", str(disk / "swept"), "--jobs", "1"]) == 0


def test_a_checkpoint_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoint").write_text("mine")
    (out / "config.toml").write_text("")
    words = ["train", "--no-privacy", "--method", "gd", "--rounds", "2", "--clients", "5", "--quiet"]
    assert command([*words, "--out", str(tmp_path / "other")]) == 0
    (out / "config.toml").write_bytes((tmp_path / "other/config.toml").read_bytes())
    assert "checkpoint" in fails(capsys, *words, "--out", str(out))
    assert (out / "checkpoint").read_text() == "mine"
