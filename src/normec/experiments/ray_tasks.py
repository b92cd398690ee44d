"""Cells as tasks of a Ray cluster whose machines share the sweep's folder.

The progress of a cell is read from its folder, and a file next to the cells asks the tasks to stop. So a sweep does not
depend on how Ray treats messages and signals, and a cell runs in the same way everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..storage.history import Row
from . import methods
from .tasks import Ending, Progress, Report, StopAsked, Task, ended, run_group

SECONDS_TO_LOOK = 1.0
SECONDS_TO_ANSWER = 10.0
TAIL = 4096  # bytes; longer than the last row of a history


def run_on_ray(
    groups: Sequence[Sequence[Task]],
    address: str,
    jobs: int | None,
    threads: int,
    report: Report,
    stop_asked: StopAsked,
) -> None:
    """Run every group as a task with `threads` cores, or on a GPU if the cluster has any; returns when all have ended.

    `address` is that of a cluster, "auto" for the cluster of this machine, or "local" for a new cluster.
    """
    if not groups:
        return
    ray = _connect(address)
    try:
        _run(ray, groups, jobs, threads, report, stop_asked)
    finally:
        ray.shutdown()


def _run(
    ray: Any, groups: Sequence[Sequence[Task]], jobs: int | None, threads: int, report: Report, stop_asked: StopAsked
) -> None:
    waiting = deque(list(group) for group in groups)
    stop = groups[0][0].folder.parent / ".stop"
    stop.unlink(missing_ok=True)
    gpu = _wants_gpu(ray, groups)
    remote = ray.remote(_serve).options(num_cpus=threads, num_gpus=int(gpu), max_retries=0)
    under_way: dict[Any, list[Task]] = {}
    seen: dict[int, int] = {}
    try:
        while waiting or under_way:
            if stop_asked() and not stop.exists():
                waiting.clear()
                stop.parent.mkdir(parents=True, exist_ok=True)
                stop.touch()
            while waiting and len(under_way) < (jobs or _slots(ray, threads, gpu)):
                group = waiting.popleft()
                under_way[remote.remote(group, threads, stop)] = group
                report(Progress(group[0].index))
            ready, _ = ray.wait(list(under_way), timeout=SECONDS_TO_LOOK) if under_way else ([], [])
            for group in under_way.values():
                _report_progress(group, seen, report)
            for reference in ready:
                group = under_way.pop(reference)
                left = _report_end(ray, reference, group, report)
                if left and not stop.exists():
                    waiting.appendleft(left)
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)
        stop.unlink(missing_ok=True)


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the next default of Ray, which warns otherwise
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("a Ray cluster needs the package ray: pip install 'normec[ray]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()  # Ray would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"there is no Ray cluster at {address!r}: {why}; `ray start --head` starts one") from None
    return ray


def _wants_gpu(ray: Any, groups: Sequence[Sequence[Task]]) -> bool:
    """Whether the cells run on GPUs: if the cluster has any and the cells do not exclude them."""
    devices = {task.config.device.partition(":")[0] for group in groups for task in group}
    has_some = ray.cluster_resources().get("GPU", 0) >= 1
    if "cuda" in devices and not has_some:
        raise UsageError("device = 'cuda', but the Ray cluster has no GPU; use device = 'auto' or 'cpu'")
    return bool(has_some and devices & {"cuda", "auto"})


def _slots(ray: Any, threads: int, gpu: bool) -> int:
    """Return how many tasks the cluster can run at once now."""
    found = ray.cluster_resources()
    return max(1, int(found.get("GPU", 0)) if gpu else int(found.get("CPU", 1)) // threads)


def _serve(group: list[Task], threads: int, stop: Path) -> list[Progress]:
    """Run the cells of a group in the cluster; returns how each ended."""
    import torch

    torch.set_num_threads(threads)
    reported: list[Progress] = []
    run_group(group, reported.append, stop.exists)
    return [progress for progress in reported if progress.ending is not None]


def _report_progress(group: Sequence[Task], seen: dict[int, int], report: Report) -> None:
    """Report the newest row of each history that has grown."""
    for task in group:
        row = _last_row(task.folder / "metrics.jsonl")
        if row is not None and row["round"] > seen.get(task.index, -1):
            seen[task.index] = row["round"]
            report(Progress(task.index, row["round"], methods.rounds(task.config), row))


def _last_row(path: Path) -> Row | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            whole = file.read().rpartition(b"\n")[0]
        row: Row = json.loads(whole.rpartition(b"\n")[2])
    except (OSError, ValueError):
        return None  # there is no complete row yet
    return row


def _report_end(ray: Any, reference: Any, group: list[Task], report: Report) -> list[Task]:
    """Report how the cells of a task ended; returns the cells that it did not start."""
    try:
        reports = ray.get(reference)
    except ray.exceptions.RayError as error:
        return _report_loss(group, " ".join(str(error).split())[:300], report)
    for progress in reports:
        report(progress)
    return []


def _report_loss(group: list[Task], why: str, report: Report) -> list[Task]:
    """Report the cells of a task whose process was lost; the folders show which cell was running."""
    for position, task in enumerate(group):
        ending = ended(task)
        report(Progress(task.index, ending=ending or Ending("failed", error=why)))
        if ending is None:
            return group[position + 1 :]
    return []
