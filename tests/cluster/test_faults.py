"""Ranks that are killed, hang, are interrupted, or come back in another number: real processes, real signals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ..cli.command import contents, normec, start
from .torchrun import ENVIRONMENT, command

RUN = ["train", "--diagnostics", "--rounds", "150", "--batch-size", "16", "--set", "checkpoint_seconds=0.0", "--quiet"]
TWO = [*RUN, "--processes", "2"]


def results(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a rank was killed."""
    return {name: data for name, data in contents(folder).items() if name.endswith((".safetensors", ".jsonl"))}


def progressed(folder: Path, process: subprocess.Popen[str], more: int = 1) -> None:
    """Wait until the run has written `more` bytes of history."""
    metrics = folder / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.stat().st_size < before + more:
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < deadline, "the run does not go on"
        time.sleep(0.01)


def ranks_of(parent: int) -> dict[int, int]:
    """Rank → process number, of the processes below `parent`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parts = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if parts else 0
        except (OSError, ValueError):
            continue
        rank = next((part[5:] for part in parts if part.startswith(b"RANK=")), None)
        if rank is not None and above == parent:
            found[int(rank)] = int(entry.name)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = normec(*TWO, "--out", "run", cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_two_processes_make_the_run_of_one(whole: Path, tmp_path: Path) -> None:
    assert normec(*RUN, "--out", "one", cwd=tmp_path).returncode == 0
    rows, alone = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, tmp_path / "one")
    )
    assert [row["round"] for row in rows] == [row["round"] for row in alone]
    assert rows[20] == pytest.approx(alone[20], rel=1e-3)  # float32: later rounds drift apart by rounding
    names = {path.name for path in whole.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "ledger.jsonl", "report.html", "clients.json"}
    assert json.loads((whole / "summary.json").read_text())["ranks"] == 2


def test_a_killed_rank_brings_the_job_back_to_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    process = start(*TWO, "--out", "run", cwd=tmp_path)
    for victim in (1, 0, 1):
        progressed(tmp_path / "run", process, 200)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        deadline = time.monotonic() + 100
        while len(ranks_of(process.pid)) == 2 and time.monotonic() < deadline:
            time.sleep(0.05)  # until the old ranks have noticed: the next victim is a new one
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    assert errors.count("was killed by SIGKILL; starting all ranks again") == 3
    assert results(tmp_path / "run") == results(whole)


def test_secure_noise_is_paid_for_at_least_as_often_as_it_leaves(tmp_path: Path) -> None:
    process = start(*TWO, "--set", "noise=secure", "--set", "sigma=2.0", "--rounds", "40", "--out", "run", cwd=tmp_path)
    progressed(tmp_path / "run", process, 200)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    releases = [line["round"] for line in lines if line["kind"] == "release"]
    assert set(releases) == set(range(40))
    # Fresh noise in a round that is made again is another release, and counts as one.
    assert len(releases) - 40 <= 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["releases"] == len(releases)


def test_torchrun_restarts_it_too(whole: Path, tmp_path: Path) -> None:
    arguments = command(2, "-m", "normec", *RUN, "--out", "run", max_restarts=2)
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    progressed(tmp_path / "run", process, 200)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors[-3000:]
    assert results(tmp_path / "run") == results(whole)


def test_a_hanging_rank_is_named(tmp_path: Path) -> None:
    long = ["train", "--rounds", "1000000", "--batch-size", "16", "--quiet", "--processes", "2", "--timeout", "15"]
    process = start(*long, "--out", "run", cwd=tmp_path)
    progressed(tmp_path / "run", process, 200)
    hanging = ranks_of(process.pid)[1]
    os.kill(hanging, signal.SIGSTOP)
    errors = process.communicate(timeout=200)[1]
    assert process.returncode == 1, errors
    assert "rank 1 did not answer within 15 s: hanging, or cut off" in errors
    assert not Path(f"/proc/{hanging}").exists()


def test_ctrl_c_then_more_ranks_then_one(tmp_path: Path) -> None:
    process = start(*TWO, "--out", "run", cwd=tmp_path)
    progressed(tmp_path / "run", process, 200)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=200)[1]
    assert process.returncode == 130, errors
    assert "to go on: normec train" in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert load_file(next((tmp_path / "run" / "checkpoint").glob("*.safetensors")))["memory"].shape[0] == 100

    process = start(*RUN, "--processes", "3", "--out", "run", cwd=tmp_path)
    progressed(tmp_path / "run", process, 200)
    process.send_signal(signal.SIGINT)
    assert process.wait(200) == 130
    assert normec(*RUN, "--out", "run", cwd=tmp_path).returncode == 0
    rows = [json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(151))
    last = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert last["privacy"]["releases"] == 150, "no release counted twice, none left out"


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    process = start("train", "--rounds", "1000000", "--quiet", "--processes", "2", "--out", "run", cwd=tmp_path)
    progressed(tmp_path / "run", process)
    ranks = ranks_of(process.pid).values()
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--processes", "0"], "processes must be a whole number >= 1, got 0"),
        (["--processes", "2", "--max-restarts", "-1"], "max_restarts must be a whole number >= 0, got -1"),
        (["--processes", "2", "--clients", "1"], "1 clients on 2 ranks leave 1 ranks without data"),
        (["--processes", "2", "--timeout", "0"], "timeout must be > 0 and finite, got 0.0"),
    ],
)
def test_mistakes_end_in_one_line(flags: list[str], words: str, tmp_path: Path) -> None:
    done = normec("train", "--rounds", "3", "--quiet", "--no-privacy", *flags, "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
