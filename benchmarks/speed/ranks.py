"""The speed-up of ranks: one process on one core compared with N ranks on N cores, and the cost of an all-reduce.

`projected` extrapolates to more ranks than the machine has: a round on R ranks consists of a rank's share of the
gradients and a ring all-reduce of 4d bytes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import normec
from normec import UsageError
from normec.distributed import join
from normec.distributed.launch import launch
from normec.distributed.process_group import launched
from normec.errors import at_least
from normec.system.processes import exit_with_parent, keep_freed_memory
from normec.training.communicator import Communicator

from .workloads import ALPHA, BETA, LR, Case, WorkloadData

LATENCY, BANDWIDTH = 50e-6, 25e9 / 8  # of a step over the Ethernet of a data centre: 50 µs, 25 Gbit/s
_MARK, _MODULE = "measured: ", "benchmarks.speed.ranks"


def run(case: Case, ranks: int, repeats: int, rounds: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure `repeats` pairs of one process and `ranks` ranks, one after the other."""
    at_least(2, ranks=ranks)
    at_least(2, rounds=rounds)
    if ranks > (os.cpu_count() or 1):
        raise UsageError(f"{ranks} ranks need a core each, and this machine has {os.cpu_count()}; lower --ranks")
    pairs = []
    for number in range(repeats):
        one, several = _measured(case, 1, rounds), _measured(case, ranks, rounds)
        pairs.append({"one": one, "ranks": several})
        log(f"pair {number + 1}: {one['round']:.3f} s alone, {several['round']:.3f} s on {ranks} ranks")
    alone = statistics.median(pair["one"]["round"] for pair in pairs)
    spread = statistics.median(pair["ranks"]["round"] for pair in pairs)
    dimension = pairs[0]["one"]["dimension"]
    return {
        "workload": case.workload,
        "clients": case.clients,
        "ranks": ranks,
        "rounds": rounds,
        "alone": alone,
        "spread": spread,
        "speedup": alone / spread,
        "pairs": [pair["one"]["round"] / pair["ranks"]["round"] for pair in pairs],
        "dimension": dimension,
        "all_reduce": statistics.median(pair["ranks"]["all_reduce"] for pair in pairs),
        "projected": {str(many): projected(alone / case.clients, dimension, many) for many in (10, 100, 1_000)},
        "threads": 1,
        "torch": torch.__version__,
    }


def projected(client: float, dimension: int, ranks: int) -> float:
    """Seconds per round with one client per rank: its gradient, then a ring of 2(R−1) steps of 4d/R bytes each."""
    return client + 2 * (ranks - 1) * (LATENCY + 4 * dimension / ranks / BANDWIDTH)


def _measured(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    done = subprocess.run(
        _command(case.workload, case.clients, ranks, rounds),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    raise RuntimeError(f"{ranks} ranks measured nothing: {done.stderr.strip()[-500:]}")


def _command(workload: str, clients: int, ranks: int, rounds: int) -> list[str]:
    return [sys.executable, "-m", _MODULE, workload, *map(str, (clients, ranks, rounds))]


class _Rounds(normec.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def round(self, round: int) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())


def _rank(case: Case, communicator: Communicator, rounds: int) -> None:
    """Measure on the core with the number of this rank; rank 0 prints the result."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[communicator.rank]})
    torch.set_num_threads(1)
    keep_freed_memory()
    data, ticks = WorkloadData(case), _Rounds()
    normec.train(
        data.problem(),
        normec.NormEC(ALPHA, BETA),
        lr=LR,
        rounds=rounds + 1,
        batch_size=data.case.spec.batch,
        callbacks=[ticks],
        logging=normec.Logging(every=rounds + 1, evaluate_every=rounds + 1),
        compute=normec.Compute(engine="loop", communicator=communicator),
    )
    dimension = sum(p.numel() for p in data.built.model.parameters())
    whole, reduced = torch.zeros(dimension), []
    for _ in range(10):
        begun = time.perf_counter()
        communicator.sum(whole)
        reduced.append(time.perf_counter() - begun)
    if communicator.rank == 0:
        rounds_taken = [after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False)]
        facts = {"round": statistics.median(rounds_taken), "all_reduce": statistics.median(reduced)}
        print(_MARK + json.dumps({**facts, "dimension": dimension}), flush=True)


def main(workload: str, clients: int, ranks: int, rounds: int) -> int:
    if ranks > 1 and not launched():
        return launch(_command(workload, clients, ranks, rounds), ranks, 0)
    exit_with_parent()
    with join() as communicator:
        _rank(Case(workload, clients), communicator, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
