"""A whole benchmark: choose the cases, measure them, and write the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from normec import UsageError
from normec.errors import one_of
from normec.gradients.precision import Precision
from normec.system.files import write_atomic

from . import picture, results
from .implementations import check_names, implementations_of
from .kept import Kept
from .measurement import Limits, Measured, Outcome, Task, measure_all, runner
from .workloads import WORKLOADS, Case


def cases(
    workloads: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    threads: int | None = None,
) -> list[Case]:
    """The combinations of workloads, numbers of clients and precisions; by default those of the workloads."""
    one_of(("cpu", "cuda"), device=device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is available; leave out --device")
    for name in workloads or []:
        one_of(WORKLOADS, workload=name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usual: tuple[Precision, ...] = ("tf32", "bf16") if device == "cuda" else ("float32",)
    return [
        Case(name, clients, device, precision, threads if threads is not None else cores)
        for precision in precisions or usual
        for name in workloads or WORKLOADS
        for clients in sizes or WORKLOADS[name].clients
    ]


def run(
    cases: Sequence[Case],
    limits: Limits,
    *,
    engines: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    floors: Sequence[str] | None = None,
    peer_python: str | None = None,
    out: Path | None = None,
    log: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure all cases and return the summary.

    `out` gets every measurement as it ends, bench.json with all of them, and cost.png at the end; what it has is not
    measured again. After Ctrl-C the summary contains what was measured until then, and its "interrupted" is true.
    """
    check_names(engines, peers, floors)
    if limits.beside > 1 and any(case.device == "cpu" for case in cases):
        raise UsageError("on a CPU one process is measured at a time; leave out --beside")
    found = [
        Measured(case, {implementation: [] for implementation in implementations_of(case, engines, peers, floors)})
        for case in cases
    ]
    where = results.conditions(found, cases[0].threads)
    kept = Kept(out, where | {"rounds": limits.rounds, "seconds": limits.seconds}) if out is not None else None

    def summary(interrupted: bool = False) -> dict[str, Any]:
        return results.summary(found, limits, where) | {"interrupted": interrupted}

    def write(final: dict[str, Any]) -> None:
        if out is not None:
            write_atomic(out / "bench.json", json.dumps(final, indent=1) + "\n")

    def keep(task: Task, outcome: Outcome) -> None:
        if kept is not None:
            kept.add(task, outcome)
        write(summary())

    if kept is not None:
        kept.fill(found)
    with runner(limits, peer_python) as started:
        if out is not None and kept is not None:
            out.mkdir(parents=True, exist_ok=True)
            kept.begin()
        final = summary(measure_all(started, found, log, keep))
    write(final)
    if out is not None:
        try:
            picture.draw(final["cases"], out / "cost.png")
        except ImportError:
            log("matplotlib is not installed, so there is no cost.png")
    return final
