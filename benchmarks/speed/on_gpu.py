"""Exactness and cost of the engines on a GPU, for models without kernels of their own, in one short process.

    python -m benchmarks.speed.on_gpu --seconds 170

It needs torch and NumPy, and transformers for the workload bert. Gradients of the shared pass are first compared with
the loop in float64, with and without a clip for each record. Then whole rounds are timed beside the floor. What does
not fit into the time is left out and named. `python -m benchmarks.speed` is the full benchmark.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from normec import UsageError
from normec.gradients.choice import choose_engine
from normec.gradients.engine import Engine
from normec.gradients.precision import PRECISIONS, Precision
from normec.gradients.record_clip import RecordClip
from normec.problems.problem import Problem

from .clock import Clock
from .implementations import ENGINE, FLOOR, PASSES, RECORD, Implementation
from .workloads import WORKLOADS, Case, WorkloadData

_COMPARED = 3, 4  # clients and records of each whose gradients are compared


def differences(name: str, device: str) -> str:
    """Return how far the shared pass is from the loop in float64, relative to the largest gradient."""
    clients, records = _COMPARED
    data = WorkloadData(Case(name, clients, device))
    of = data.problem(records).to(torch.device(device), torch.float64)
    found = []
    for kind, clip in (("", None), ("clipped ", RecordClip(0.1))):
        shared, loop = (choose_engine(engine, of, None, 0, clip, "float32") for engine in ("shared", "loop"))
        mine, theirs = _gradients(shared, of), _gradients(loop, of)
        apart = float((mine - theirs).abs().max() / theirs.abs().max())
        found.append(f"{kind}{apart:.1e}" if shared.name == "shared" else f"{kind}not by the shared pass")
    return ", ".join(found)


def _gradients(engine: Engine, of: Problem) -> torch.Tensor:
    return torch.cat([block.grads.clone() for block in engine.blocks(of.x0, of.initial_buffers(), 0)])


def milliseconds(implementation: Implementation, case: Case, rounds: int) -> str:
    """Return the median time of a round, and the peak memory of the device."""
    on_gpu = case.device != "cpu"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    clock = Clock(rounds, 2.0, wait=wait, block=min(10, rounds) if on_gpu else 1)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    implementation.run(implementation.data(case), clock)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB" if on_gpu else ""
    return f"{1e3 * float(torch.tensor(clock.times).median()):8.2f} ms  {memory}"


def main() -> None:
    """Compare and measure what fits into the time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=170.0, help="nothing is begun after this time")
    parser.add_argument("--workloads", default="gpt,vit,bert", help="names of workloads, with commas between them")
    parser.add_argument("--precisions", default="tf32,bf16", help="names of precisions, with commas between them")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    names, precisions = given.workloads.split(","), given.precisions.split(",")
    for choices, wanted in ((WORKLOADS, names), (PRECISIONS, precisions)):
        for name in wanted:
            if name not in choices:
                parser.error(f"unknown name {name!r}; choose from {', '.join(choices)}")

    def each(label: str, work: Callable[[], str]) -> None:
        if time.monotonic() > end:
            print(f"{label:44} not measured, the time is over", flush=True)
            return
        began = time.monotonic()
        try:
            found = work()
        except (UsageError, RuntimeError) as error:
            found = f"failed: {(str(error).splitlines() or [type(error).__name__])[0][:120]}"
        print(f"{label:44} {found}  ({time.monotonic() - began:.1f} s)", flush=True)

    for name in names:
        each(f"{name}, float64, shared against loop", partial(differences, name, given.device))
    on_gpu = given.device == "cuda"
    quick = [Implementation(ENGINE, "shared"), Implementation(ENGINE, "recorded"), Implementation(RECORD)]
    quick += [Implementation(PASSES), Implementation(FLOOR, "graphed" if on_gpu else "eager")]
    # Compiling takes longest.
    compiled = [Implementation(kind, "compiled") for kind in (ENGINE, RECORD)] if on_gpu else []
    compiled += [Implementation(FLOOR, "compiled-graphed")] if on_gpu else []
    for implementations in (quick, compiled):
        for precision in precisions:
            for name in names:
                for implementation in implementations:
                    case = Case(name, given.clients, given.device, cast(Precision, precision))
                    label = f"{name}, {precision}, {implementation.name}"
                    each(label, partial(milliseconds, implementation, case, given.rounds))


if __name__ == "__main__":
    main()
