"""The summary of the measurements: medians, spreads and ratios."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import normec

from .implementations import ENGINE, FLOOR, PASSES, RECORD, Implementation
from .measurement import Limits, Measured, Outcome

Row = dict[str, Any]


def conditions(measured: Sequence[Measured], threads: int) -> dict[str, Any]:
    """Where and with what the measurements are made."""
    gpu = any(found.case.device != "cpu" for found in measured)
    return {
        "versions": {"normec": normec.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "code": _code(),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": threads,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
        },
    }


def summary(measured: Sequence[Measured], limits: Limits, where: dict[str, Any]) -> dict[str, Any]:
    """The summary of all cases, for JSON."""
    return {**where, "limits": vars(limits), "cases": [case_summary(found) for found in measured]}


def case_summary(found: Measured) -> dict[str, Any]:
    """The rows of a case, and the times that ratios refer to: the floor, the memory passes, our fastest engine."""
    case = found.case
    rows = [_row(implementation, outcomes) for implementation, outcomes in found.outcomes.items()]
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


def _row(implementation: Implementation, outcomes: list[Outcome]) -> Row:
    """One implementation over all its processes: the median of their medians, and the range of the medians."""
    timed = [outcome for outcome in outcomes if outcome.get("times")]
    medians = [statistics.median(outcome["times"]) for outcome in timed]
    last = outcomes[-1] if outcomes else {"status": "not run"}
    return {
        "name": implementation.name,
        **implementation.to_dict(),
        "per_record": implementation.per_record,
        "status": last["status"],
        "reason": last.get("reason"),
        "note": last.get("note") or None,
        "seconds": statistics.median(medians) if medians else None,
        "mean": statistics.median(statistics.fmean(outcome["times"]) for outcome in timed) if timed else None,
        "spread": [min(medians), max(medians)] if medians else None,
        "rounds": sum(len(outcome["times"]) for outcome in timed),
        "processes": len(timed),
        "start_up": [outcome["start_up"] for outcome in timed if "start_up" in outcome],
        "peak_bytes": max((outcome["peak_bytes"] for outcome in timed), default=None),
        "device_bytes": max((outcome["device_bytes"] or 0 for outcome in timed), default=0) or None,
        "waited": max((outcome["waited"] for outcome in timed), default=None),
        "versions": last.get("versions"),
    }


def scaling(cases: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(n, seconds per round) of every implementation that was measured; for the floor, its fastest variant."""
    found: dict[str, list[tuple[int, float]]] = {}
    for case in sorted(cases, key=lambda case: int(case["clients"])):
        for row in case["rows"]:
            if row["seconds"] is not None and (row["kind"] != FLOOR or row["seconds"] == case["floor"]):
                name = "floor, best" if row["kind"] == FLOOR else row["name"]
                found.setdefault(name, []).append((case["clients"], row["seconds"]))
    return found


def processor() -> str:
    """The name of the processor, if it is known."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _code() -> str:
    """A digest of the code that is measured and that measures."""
    digest = hashlib.sha256()
    for folder in (Path(normec.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _least(rows: list[Row], kind: str) -> float | None:
    return min((row["seconds"] for row in rows if row["kind"] == kind and row["seconds"] is not None), default=None)


def _ratio(seconds: float | None, to: float | None) -> float | None:
    return seconds / to if seconds is not None and to is not None else None
