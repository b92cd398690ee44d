"""A job whose processes are killed again and again: `python -m tests.distributed.kills KILLS SEED FOLDER`.

A kill takes a rank, two ranks one after the other, or the launcher; in start-up, in a round, or in a checkpoint. After
each kill either the launcher says which rank it lost, or it is gone and the ranks with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from .processes import Job, wait_for_end

RANKS = 3
RUN = ["train", "--batch-size", "12", "--set", "checkpoint_seconds=0.0", "--quiet", "--seed", "0"]
RUN += ["--rounds", "1000000", "--set", "log_every=1", "--processes", str(RANKS), "--max-restarts", "100000"]


def kill_again_and_again(kills: int, seed: int, folder: Path) -> list[float]:
    """Kill `kills` times, then stop the run; returns how long each recovery took, in seconds."""
    chance = random.Random(seed)
    took: list[float] = []
    job = Job.of_normec(*RUN, cwd=folder)
    while len(took) < kills:
        job.wait_for_ranks(RANKS)
        if chance.random() < 0.6:
            job.wait_for_history()
        time.sleep(chance.uniform(0, chance.choice((0.0, 0.05, 0.5, 3.0))))  # where the kill falls is left to chance
        ranks = job.ranks
        begun = time.monotonic()
        if chance.random() < 0.15:
            job.process.kill()
            job.ended()
            for process in ranks.values():
                wait_for_end(process)
            job = Job.of_normec(*RUN, cwd=folder)
        else:
            victims = chance.sample(sorted(ranks), chance.choice((1, 1, 2)))
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[victim], signal.SIGKILL)
            blamed = job.blamed()
            assert blamed in victims, f"rank {blamed} is blamed, ranks {victims} were killed: {job.errors}"
        took.append(time.monotonic() - begun)
        print(f"kill {len(took)}: {took[-1]:.1f} s", flush=True)
    job.wait_for_history()
    job.process.send_signal(signal.SIGINT)
    assert job.ended() == 130, job.errors
    rows = [json.loads(line)["round"] for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(len(rows))), "a row of history was lost or written twice"
    return took


if __name__ == "__main__":
    where = Path(sys.argv[3])
    where.mkdir(parents=True, exist_ok=True)
    recoveries = kill_again_and_again(int(sys.argv[1]), int(sys.argv[2]), where)
    print(f"{len(recoveries)} kills, longest recovery {max(recoveries, default=0.0):.1f} s", flush=True)
