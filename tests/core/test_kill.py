"""Real SIGKILLs: whatever the instant, the folder is whole and the run goes on to the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from normec import Callback, Clip21, FixedSize, train

from .runs import problem, same, snapshot

ROUNDS = 200
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "rounds": ROUNDS,
    "batch_size": 4,
    "participation": FixedSize(3),
    "log_every": 1,
    "checkpoint_seconds": 0,  # a checkpoint a round: most instants fall into one
}


class Ready(Callback):
    """Tells when rounds are being done, by making a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def round(self, round: int) -> None:  # noqa: ARG002
        self.path.touch()


def child(out: Path, ready: Path) -> None:
    train(problem("batchnorm"), Clip21(0.3), out=out, callbacks=[Ready(ready)], **OPTIONS)


def test_a_run_killed_at_random_instants_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Children fork from a server that has torch imported, so that a start costs little."""
    alone = train(problem("batchnorm"), Clip21(0.3), **OPTIONS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "normec.training", "normec.problem", "safetensors.torch"])
    instants, killed, rounds = random.Random(3), 0, [0]
    for attempt in range(12):
        ready = tmp_path / f"ready-{attempt}"
        process = context.Process(target=child, args=(tmp_path / "run", ready))
        process.start()
        while not ready.exists() and process.is_alive():
            time.sleep(0.002)
        time.sleep(instants.uniform(0, 0.08))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        latest = tmp_path / "run/checkpoint/latest.json"
        rounds.append(json.loads(latest.read_text())["round"] if latest.exists() else 0)
        if rounds[-1] == ROUNDS:
            break
    assert killed >= 3
    assert rounds == sorted(rounds)  # it never went back
    resumed = train(problem("batchnorm"), Clip21(0.3), out=tmp_path / "run", **OPTIONS)
    same(alone, resumed)
    assert set(snapshot(tmp_path / "run")) == {
        ".lock",
        "metrics.jsonl",
        "checkpoint/latest.json",
        f"checkpoint/round-{ROUNDS:08d}.safetensors",
    }
