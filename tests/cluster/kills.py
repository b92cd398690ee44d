"""A job whose processes are killed again and again: `python -m tests.cluster.kills KILLS SEED FOLDER ROUNDS`.

A kill takes a rank, two ranks at once, or the launcher; in start-up, in a round, in a checkpoint, or in the moment in
which the others notice an earlier kill. After each kill either the launcher says which rank it lost, or it is gone and
the ranks with it. The limits below are for hangs alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from .processes import Job, wait_for_end

RANKS = 3
RUN = ["train", "--batch-size", "16", "--set", "checkpoint_seconds=0.0", "--quiet", "--seed", "0"]
RUN += ["--processes", str(RANKS), "--max-restarts", "100000"]


def kill_again_and_again(kills: int, seed: int, folder: Path, rounds: int) -> list[float]:
    """Kill `kills` times, then let the run end; returns how long each recovery took, in seconds."""
    chance = random.Random(seed)
    took: list[float] = []

    def started() -> Job:
        return Job.of_normec(*RUN, "--rounds", str(rounds), cwd=folder)

    job = started()
    while len(took) < kills and not job.over:
        job.wait_for_ranks(RANKS)
        if chance.random() < 0.6:
            job.wait_for_rounds()
        time.sleep(chance.uniform(0, chance.choice((0.0, 0.05, 0.5, 3.0))))  # where the kill falls is left to chance
        ranks = job.ranks
        begun = time.monotonic()
        if chance.random() < 0.15:
            job.process.kill()
            job.ended()
            for process in ranks.values():
                wait_for_end(process)
            job = started()
        elif ranks:
            victims = chance.sample(sorted(ranks), min(len(ranks), chance.choice((1, 1, 2))))
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[victim], signal.SIGKILL)
            blamed = job.blamed()
            assert blamed in victims or blamed is None, f"rank {blamed} is blamed, ranks {victims} were killed"
        took.append(time.monotonic() - begun)
        print(f"kill {len(took)}: {took[-1]:.1f} s", flush=True)
    assert job.ended() == 0, job.errors
    return took


if __name__ == "__main__":
    where = Path(sys.argv[3])
    where.mkdir(parents=True, exist_ok=True)
    recoveries = kill_again_and_again(int(sys.argv[1]), int(sys.argv[2]), where, rounds=int(sys.argv[4]))
    print(f"{len(recoveries)} kills, longest recovery {max(recoveries, default=0.0):.1f} s", flush=True)
