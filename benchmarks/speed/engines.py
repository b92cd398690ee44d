"""The engines of normec: whole rounds of `normec.train`, from the selection of batches to the server's step."""

from __future__ import annotations

import normec
from normec.system.processes import keep_freed_memory

from .clock import Clock
from .workloads import ALPHA, BETA, LR, Case, WorkloadData


class _Enough(Exception):  # noqa: N818  (ends a run that has been measured; not an error)
    pass


class _ClockCallback(normec.Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def round(self, round: int) -> None:  # noqa: ARG002
        if self._clock.tick():
            raise _Enough


def run(data: WorkloadData, clock: Clock, engine: str) -> str:
    """NormEC without noise and with a single row of history; freed memory is kept, as in the `normec` command."""
    keep_freed_memory()
    case = data.case
    _train(data.problem(), normec.NormEC(ALPHA, BETA), case, clock, engine=engine, batch=case.spec.batch)
    return ""


def per_record(data: WorkloadData, clock: Clock, engine: str) -> str:
    """DP-SGD with record-level clipping, as in Opacus, with full gradients of `batch` records."""
    case = data.case
    privacy = normec.Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="central")
    problem = data.problem(case.spec.batch, distinct=True)
    _train(problem, normec.DPSGD(normec.Clip(1.0)), case, clock, engine=engine, privacy=privacy)
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
            rounds=clock.max_rounds,
            batch_size=batch,
            participation=normec.FixedSize(case.drawn) if case.drawn < case.clients else None,
            privacy=privacy,
            device=case.device,
            callbacks=[_ClockCallback(clock)],
            logging=normec.Logging(every=clock.max_rounds, evaluate_every=clock.max_rounds),
            compute=normec.Compute(engine=engine, precision=case.precision),
        )
    except _Enough:
        return
    raise RuntimeError("training ended before enough rounds were timed")
