"""A run killed with SIGKILL at any instant goes on, by the same command, to the same bytes."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from ..support.forks import ROOT, Fork
from ..support.runs import results
from .command import completed, normec

RUN = ["train", "--rounds", "150", "--batch-size", "12", "--seed", "0", "--set", "checkpoint_seconds=0.0", "--quiet"]


# Runs the command; says on standard output that it has flushed so many files to the disk, goes on for twenty more, and
# waits there for the end of its standard input: however slow the machine is, a signal reaches it while it trains.
HELD = """
import os, sys
from normec.__main__ import main

flush, done, said_at = os.fsync, 0, int(sys.argv[1])

def counted(file):
    global done
    done += 1
    if done == said_at:
        print("training", flush=True)
    if done == said_at + 20:
        sys.stdin.read()
    return flush(file)

os.fsync = counted
sys.argv = ["normec", *sys.argv[2:]]
main()
"""


def held(flushes: int, *arguments: str, cwd: Path) -> Fork:
    """The command, which has flushed so much and will not end before its standard input does."""
    (cwd / "held.py").write_text(HELD)
    process = Fork(["held.py", str(flushes), *arguments], cwd)
    assert process.stdout.readline() == "training\n", process.communicate()[1]
    return process


@pytest.mark.slow
def test_sigkill_at_random_instants(tmp_path: Path) -> None:
    assert normec(*RUN, "--out", "whole", cwd=tmp_path).returncode == 0
    chance = random.Random(5)
    rounds = [0]
    for _ in range(6):
        process = held(chance.randrange(4, 24), *RUN, "--out", "killed", cwd=tmp_path)
        time.sleep(chance.uniform(0, 0.02))  # spreads the kills over a round; nothing depends on it
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        rounds.append(json.loads((tmp_path / "killed" / "checkpoint" / "latest.json").read_text())["round"])
    assert rounds == sorted(set(rounds)), "a process that was killed brought the run no further"
    assert normec(*RUN, "--out", "killed", cwd=tmp_path).returncode == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--no-privacy", "--set", "sample_rate=0.6"]], ids=["private", "sampled"])
def test_sigkill_at_every_disk_operation(words: list[str], tmp_path: Path) -> None:
    arguments = ["train", "--rounds", "2", "--clients", "5", "--seed", "0", "--quiet", *words]
    arguments += ["--set", "checkpoint_seconds=0.0"]
    folder = tmp_path / "killed"
    folder.mkdir()
    done = completed("-m", "tests.cli.killing", str(folder), *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [path for path in folder.iterdir() if path.is_dir()]
    assert len(runs) >= 20
    expected = results(tmp_path / "whole")
    assert expected.keys() >= {"config.toml", "metrics.jsonl", "summary.json", "checkpoint/latest.json"}
    assert ("ledger.jsonl" in expected) == (words == [])
    for folder in runs:
        assert results(folder) == expected, folder.name
        assert not list(folder.rglob("*.part")), folder.name


@pytest.mark.slow
def test_ctrl_c_stops_after_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    command = [*RUN[:-1], "--out", "run"]
    process = held(8, *command, cwd=tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()  # which ends its standard input
    assert process.returncode == 130, said
    assert "stopped after round" in said
    again = said[said.index("to continue: ") :].split()[2:]
    assert again == ["normec", *command]
    assert (tmp_path / "run" / "checkpoint" / "latest.json").exists()
    assert "interrupted" in (tmp_path / "run" / "summary.json").read_text()
    other = [part if part != "run" else "whole" for part in command]
    assert normec(*command, "--quiet", cwd=tmp_path).returncode == 0
    assert normec(*other, "--quiet", cwd=tmp_path).returncode == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    first = held(8, *RUN, "--out", "run", cwd=tmp_path)
    second = normec(*RUN, "--out", "run", cwd=tmp_path)
    first.kill()
    first.communicate()
    assert second.returncode == 2
    assert "another process writes to" in second.stderr
