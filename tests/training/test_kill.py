"""Real SIGKILLs: whatever the instant, the folder is whole and the run goes on to the same bits."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import Callback, Clip21, FixedSize, Logging, Storage, train
from normec.storage.checkpoint import Checkpoints

from ..support.runs import problem, same, snapshot

ROUNDS = 120
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "rounds": ROUNDS,
    "batch_size": 4,
    "participation": FixedSize(3),
    "logging": Logging(every=1),
    "storage": Storage(checkpoint_seconds=0),  # a checkpoint a round: most instants fall into one
}


class Reports(Callback):
    """Sends a byte a round; after nine rounds the run waits to be killed, so that no kill can come too late."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.done = pipe, 0

    def round(self, round: int) -> None:  # noqa: ARG002
        self.pipe.send_bytes(b".")
        self.done += 1
        if self.done == 9:
            signal.pause()


def child(out: Path, pipe: Connection) -> None:
    train(problem("batchnorm"), Clip21(0.3), out=out, callbacks=[Reports(pipe)], **OPTIONS)


def saver(folder: Path) -> None:
    """Dies of SIGXFSZ in the midst of writing 8 MiB of tensors: a file may have 1 MiB here."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    Checkpoints(folder, {}).save(2, {"memory": torch.zeros(2**21)}, {})


def kill_after(folder: Path, rounds: int, later: float) -> None:
    """Train in a process that forks from a server with torch imported; SIGKILL it when so many rounds are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "normec.training.train", "normec.problems.problem", "safetensors.torch"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(folder, writer))
    process.start()
    writer.close()
    for _ in range(rounds):
        reader.recv_bytes()
    time.sleep(later)  # spreads the kills over a round; nothing depends on it
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_at_random_instants_ends_in_the_same_bits(tmp_path: Path) -> None:
    alone = train(problem("batchnorm"), Clip21(0.3), **OPTIONS)
    chance, rounds = random.Random(3), [0]
    for _ in range(12):
        kill_after(tmp_path / "run", chance.randrange(1, 6), chance.uniform(0, 0.01))
        latest = tmp_path / "run/checkpoint/latest.json"
        rounds.append(json.loads(latest.read_text())["round"] if latest.exists() else 0)
    assert rounds == sorted(rounds)  # it never went back
    assert 0 < rounds[-1] < ROUNDS
    resumed = train(problem("batchnorm"), Clip21(0.3), out=tmp_path / "run", **OPTIONS)
    same(alone, resumed)
    held = set(snapshot(tmp_path / "run"))
    assert held >= {"metrics.jsonl", "checkpoint/latest.json", f"checkpoint/round-{ROUNDS:08d}.safetensors"}
    assert not [name for name in held if name.endswith(".part")]


@pytest.mark.slow
def test_what_a_kill_left_half_written_does_not_pile_up(tmp_path: Path) -> None:
    store, state = Checkpoints(tmp_path, {}), {"x": torch.ones(3)}
    store.save(1, state, {})
    process = multiprocessing.get_context("forkserver").Process(target=saver, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGXFSZ
    found = store.load()
    assert found is not None
    assert torch.equal(found[0]["x"], state["x"])  # the old one stands
    store.save(3, state, {})
    assert set(snapshot(tmp_path)) == {"latest.json", "round-00000003.safetensors"}


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    store, state = Checkpoints(tmp_path, {}), {"x": torch.ones(3)}
    store.save(1, state, {})
    before = snapshot(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(Exception, match=r"too large"):  # as near to a full disk as one gets
            store.save(2, {"memory": torch.zeros(2**21)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert snapshot(tmp_path) == before
