"""A job whose processes are killed again and again: `python -m tests.cluster.kills KILLS SEED FOLDER ROUNDS`.

A kill takes a rank, two ranks at once, or the launcher; in start-up, in a round, in a checkpoint, or in the moment in
which the others notice an earlier kill. After each kill either the launcher says which rank it lost, or it is gone and
the ranks with it. The limits below are for hangs alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ..cli.command import COMMAND
from .processes import ranks_of, wait_for_end, wait_until
from .torchrun import ENVIRONMENT

RUN = ["train", "--batch-size", "16", "--set", "checkpoint_seconds=0.0", "--quiet", "--seed", "0"]
RANKS = 3


class Job:
    """One launcher, and the lines that it prints, as they come."""

    def __init__(self, folder: Path, rounds: int) -> None:
        flags = [*RUN, "--rounds", str(rounds), "--processes", str(RANKS), "--max-restarts", "100000", "--out", "run"]
        self.process = subprocess.Popen(
            [*COMMAND, *flags],
            cwd=folder,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.folder = folder
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_started(self) -> None:
        """Until all ranks of a life are there, or the run has ended."""
        wait_until(lambda: len(ranks_of(self.process.pid)) == RANKS or self.process.poll() is not None)

    def wait_for_progress(self) -> None:
        """Until the history changes, or the run has ended."""
        before = self._history()
        wait_until(lambda: self._history() != before or self.process.poll() is not None)

    def _history(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line.rstrip())
        self.lines.put(None)

    def blamed(self) -> int | None:
        """The rank that the launcher says was killed; None where the run ended instead."""
        while True:
            line = self.lines.get(timeout=600)
            if line is None:
                return None
            found = re.match(r"rank (\d+) was killed by SIGKILL; starting all ranks again", line)
            if found:
                return int(found[1])


def kill_again_and_again(kills: int, seed: int, folder: Path, rounds: int) -> list[float]:
    """Kill `kills` times, then let the run end; returns how long each recovery took, in seconds."""
    chance = random.Random(seed)
    took: list[float] = []
    job = Job(folder, rounds)
    while len(took) < kills:
        job.wait_until_started()
        if chance.random() < 0.6:  # let the ranks get somewhere: the run is in its rounds
            job.wait_for_progress()
        time.sleep(chance.uniform(0, chance.choice((0.0, 0.05, 0.5, 3.0))))  # where the kill falls is left to chance
        ranks = ranks_of(job.process.pid)
        if job.process.poll() is not None:
            break
        begun = time.monotonic()
        if chance.random() < 0.15:
            job.process.kill()
            job.process.wait()
            for process in ranks.values():
                wait_for_end(process)
            job = Job(folder, rounds)
        else:
            victims = chance.sample(sorted(ranks), min(len(ranks), chance.choice((1, 1, 2))))
            for victim in victims:
                _kill(ranks[victim])
            if victims:
                blamed = job.blamed()
                if blamed is None:
                    break
                assert blamed in victims, f"rank {blamed} is blamed, ranks {victims} were killed"
        took.append(time.monotonic() - begun)
        print(f"kill {len(took)}: {took[-1]:.1f} s", flush=True)
    while job.blamed() is not None:
        pass
    assert job.process.wait(600) == 0
    return took


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    where = Path(sys.argv[3])
    where.mkdir(parents=True, exist_ok=True)
    recoveries = kill_again_and_again(int(sys.argv[1]), int(sys.argv[2]), where, rounds=int(sys.argv[4]))
    print(f"{len(recoveries)} kills, longest recovery {max(recoveries, default=0.0):.1f} s", flush=True)
