"""What the measurements say: medians, spreads, ratios."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from normec import __version__

from .contestants import ENGINE, FLOOR, PASSES, RECORD, Contestant
from .measure import Effort, Measured, Outcome

Row = dict[str, Any]


def summary(measured: list[Measured], effort: Effort, threads: int) -> dict[str, Any]:
    """Everything, ready for JSON."""
    gpu = any(found.case.device != "cpu" for found in measured)
    return {
        "versions": {"normec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": threads,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
        },
        "effort": vars(effort),
        "cases": [case_summary(found) for found in measured],
    }


def case_summary(found: Measured) -> dict[str, Any]:
    """A case's rows, and the times that ratios are taken to: the best floor, the passes, the best of our engines."""
    case = found.case
    rows = [_row(contestant, outcomes) for contestant, outcomes in found.outcomes.items()]
    best = {kind: _least(rows, kind) for kind in (FLOOR, PASSES, ENGINE, RECORD)}
    floor, passes = best[FLOOR], best[PASSES]
    both = floor + passes if floor is not None and passes is not None else None
    for row in rows:
        ours = best[RECORD if row["per_record"] else ENGINE]
        row |= {
            "over_floor": _ratio(row["seconds"], floor),
            "over_floor_and_passes": _ratio(row["seconds"], both),
            "over_ours": _ratio(row["seconds"], ours),
        }
    return {
        "workload": case.workload,
        "clients": case.clients,
        "drawn": case.drawn,
        "batch": case.spec.batch,
        "device": case.device,
        "precision": case.precision,
        "floor": floor,
        "passes": passes,
        "ours": best[ENGINE],
        "rows": rows,
    }


def _row(contestant: Contestant, outcomes: list[Outcome]) -> Row:
    """One contestant over all its processes: the median of the processes' medians, from the least to the greatest."""
    timed = [outcome for outcome in outcomes if outcome.get("times")]
    medians = [statistics.median(outcome["times"]) for outcome in timed]
    last = outcomes[-1] if outcomes else {"status": "not run"}
    return {
        "name": contestant.name,
        **contestant.to_dict(),
        "per_record": contestant.per_record,
        "status": last["status"],
        "reason": last.get("reason"),
        "note": last.get("note") or None,
        "seconds": statistics.median(medians) if medians else None,
        "mean": statistics.median(statistics.fmean(outcome["times"]) for outcome in timed) if timed else None,
        "spread": [min(medians), max(medians)] if medians else None,
        "rounds": sum(len(outcome["times"]) for outcome in timed),
        "processes": len(timed),
        "start_up": [outcome["start_up"] for outcome in timed],
        "peak_bytes": max((outcome["peak_bytes"] for outcome in timed), default=None),
        "device_bytes": max((outcome["device_bytes"] or 0 for outcome in timed), default=0) or None,
        "waited": max((outcome["waited"] for outcome in timed), default=None),
        "versions": last.get("versions"),
    }


def scaling(cases: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(n, seconds a round) of every contestant where it was measured; of the floors, the best."""
    found: dict[str, list[tuple[int, float]]] = {}
    for case in sorted(cases, key=lambda case: int(case["clients"])):
        for row in case["rows"]:
            if row["seconds"] is not None and (row["kind"] != FLOOR or row["seconds"] == case["floor"]):
                name = "floor, best" if row["kind"] == FLOOR else row["name"]
                found.setdefault(name, []).append((case["clients"], row["seconds"]))
    return found


def processor() -> str:
    """The processor's name, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _least(rows: list[Row], kind: str) -> float | None:
    return min((row["seconds"] for row in rows if row["kind"] == kind and row["seconds"] is not None), default=None)


def _ratio(seconds: float | None, to: float | None) -> float | None:
    return seconds / to if seconds is not None and to is not None else None
