"""A whole benchmark: cases chosen, measured, written down as it goes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from normec.errors import UsageError, one_of
from normec.gradients.precision import Precision
from normec.system.files import write_atomic

from . import picture, results
from .contestants import check_names, line_up
from .measure import Effort, Measured, arena, compete
from .workloads import WORKLOADS, Case


def cases(
    workloads: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    threads: int | None = None,
) -> list[Case]:
    """Every workload with every number of clients, in every precision; what is not given is the usual."""
    one_of(("cpu", "cuda"), device=device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is to be seen here; leave out --device")
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
    effort: Effort,
    *,
    engines: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    floors: Sequence[str] | None = None,
    peer_python: str | None = None,
    out: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """The summary of all measurements; `out` gets bench.json after every process, and cost.png at the end.

    After Ctrl-C the summary is of what was measured until then, and its "interrupted" is true.
    """
    check_names(engines, peers, floors)
    measured: list[Measured] = []

    def keep(current: Measured) -> None:
        if out is not None:
            write_atomic(out / "bench.json", json.dumps(summary([*measured, current]), indent=1) + "\n")

    def summary(found: list[Measured], interrupted: bool = False) -> dict[str, Any]:
        return results.summary(found, effort, cases[0].threads) | {"interrupted": interrupted}

    interrupted = False
    with arena(effort, peer_python) as place:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for case in cases:
            found, interrupted = compete(place, case, line_up(case, engines, peers, floors), say, keep)
            measured.append(found)
            if interrupted:
                break
    final = summary(measured, interrupted)
    if out is not None:
        write_atomic(out / "bench.json", json.dumps(final, indent=1) + "\n")
        picture.draw(final["cases"], out / "cost.png")
    return final
