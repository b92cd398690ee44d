"""A party or the server of `normec federation local` is killed: the command says so, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.forks import Fork
from ..support.waiting import LIMIT, wait_for
from .local_command import forked, running, started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "start", "says"),
    [
        (("federation party", "--partition 1"), forked, "party-1 was killed by SIGKILL"),
        # Nobody waits for a forked app of the server, so that its death is noticed late.
        (("flwr-serverapp",), started, "was killed or crashed before the end of the run"),
    ],
    ids=["party", "server"],
)
def test_a_death_is_said_and_nothing_is_left(
    words: tuple[str, ...], start: Callable[..., Fork | subprocess.Popen[str]], says: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(out, "--rounds", "1000")
    rows = out / "metrics.jsonl"
    wait_for(lambda: (rows.exists() and b"\n" in rows.read_bytes()) or process.poll() is not None, "the first row")
    assert process.poll() is None, process.communicate()[1]
    victim = next(pid for pid, line in running(out).items() if all(word in line for word in words))
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert says in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1
    assert not running(out)
