"""Our engines: whole rounds of `normec.train`, from the drawing of batches to the server's step."""

from __future__ import annotations

import normec
from normec.system.processes import keep_freed_memory

from .clock import Clock
from .workloads import ALPHA, BETA, LR, Case, Material


class _Enough(Exception):  # noqa: N818  (not an error: how a run that has been measured ends)
    pass


class _Ticks(normec.Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def round(self, round: int) -> None:  # noqa: ARG002
        if self._clock.tick():
            raise _Enough


def run(material: Material, clock: Clock, engine: str) -> str:
    """NormEC without noise; no rows of history but the first. The heap is as the `normec` command has it."""
    keep_freed_memory()
    case = material.case
    _train(material.problem(), normec.NormEC(ALPHA, BETA), case, clock, engine=engine, batch=case.spec.batch)
    return ""


def per_record(material: Material, clock: Clock) -> str:
    """Every record's gradient clipped, noise on the sum: what Opacus is for. Full gradients of `batch` records."""
    case = material.case
    privacy = normec.Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="central")
    problem = material.problem(case.spec.batch)
    _train(problem, normec.DPSGD(normec.Clip(1.0)), case, clock, privacy=privacy)
    return "GroupNorm" if case.images else ""


def _train(
    problem: normec.Problem,
    method: normec.Method,
    case: Case,
    clock: Clock,
    *,
    engine: str = "auto",
    batch: int | None = None,
    privacy: normec.Privacy | None = None,
) -> None:
    try:
        normec.train(
            problem,
            method,
            lr=LR,
            rounds=clock.most,
            batch_size=batch,
            participation=normec.FixedSize(case.drawn) if case.drawn < case.clients else None,
            privacy=privacy,
            log_every=clock.most,
            evaluate_every=clock.most,
            device=case.device,
            engine=engine,
            precision=case.precision,
            callbacks=[_Ticks(clock)],
        )
    except _Enough:
        return
    raise RuntimeError("training ended before the clock had seen enough rounds")
