"""A whole benchmark: choose the cases, measure them, and write the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from normec import UsageError
from normec.errors import one_of
from normec.gradients.precision import Precision
from normec.system.files import write_atomic

from . import picture, results
from .implementations import check_names, implementations_of
from .measurement import Limits, Measured, measure_all, runner
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
    usual: tuple[Precision, ...] = get_args(Precision) if device == "cuda" else ("float32",)
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

    `out` gets bench.json after every process and cost.png at the end. After Ctrl-C the summary contains what was
    measured until then, and its "interrupted" is true.
    """
    check_names(engines, peers, floors)
    measured: list[Measured] = []

    def keep(current: Measured) -> None:
        if out is not None:
            write_atomic(out / "bench.json", json.dumps(summary([*measured, current]), indent=1) + "\n")

    def summary(found: list[Measured], interrupted: bool = False) -> dict[str, Any]:
        return results.summary(found, limits, cases[0].threads) | {"interrupted": interrupted}

    interrupted = False
    with runner(limits, peer_python) as started:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for case in cases:
            found, interrupted = measure_all(started, case, implementations_of(case, engines, peers, floors), log, keep)
            measured.append(found)
            if interrupted:
                break
    final = summary(measured, interrupted)
    if out is not None:
        write_atomic(out / "bench.json", json.dumps(final, indent=1) + "\n")
        picture.draw(final["cases"], out / "cost.png")
    return final
