"""Cells as the tasks of a Ray cluster, whose machines all see the sweep's folder.

How far a cell is, is read from its folder; a file beside the cells asks the tasks to stop. So nothing of a sweep
depends on what Ray does with messages and signals, and a cell is the same wherever it runs.
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
TAIL = 4096  # bytes; more than the last row of a history has


def run_on_ray(
    groups: Sequence[Sequence[Task]],
    address: str,
    jobs: int | None,
    threads: int,
    report: Report,
    stop_asked: StopAsked,
) -> None:
    """Run every group as a task with `threads` cores, or a GPU where the cluster has some; returns when all ended.

    `address` is a cluster's, "auto" for the one this machine belongs to, or "local" for one of its own.
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent home
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's next default; it warns otherwise
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("a Ray cluster needs the package ray: pip install 'normec[ray]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()  # Ray itself would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"there is no Ray cluster at {address!r}: {why}; `ray start --head` starts one") from None
    return ray


def _wants_gpu(ray: Any, groups: Sequence[Sequence[Task]]) -> bool:
    """Whether the cells go to GPUs: those that do not say otherwise do, where the cluster has any."""
    devices = {task.config.device.partition(":")[0] for group in groups for task in group}
    has_some = ray.cluster_resources().get("GPU", 0) >= 1
    if "cuda" in devices and not has_some:
        raise UsageError("device = 'cuda', but the Ray cluster has no GPU")
    return bool(has_some and devices & {"cuda", "auto"})


def _slots(ray: Any, threads: int, gpu: bool) -> int:
    """How many tasks the cluster can run at once, as it is now."""
    found = ray.cluster_resources()
    return max(1, int(found.get("GPU", 0)) if gpu else int(found.get("CPU", 1)) // threads)


def _serve(group: list[Task], threads: int, stop: Path) -> list[Progress]:
    """In the cluster: run the cells of a group; returns how each ended."""
    import torch

    torch.set_num_threads(threads)
    heard: list[Progress] = []
    run_group(group, heard.append, stop.exists)
    return [message for message in heard if message.ending is not None]


def _report_progress(group: Sequence[Task], seen: dict[int, int], report: Report) -> None:
    """The newest row of each history that has grown."""
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
        return None  # not there yet
    return row


def _report_end(ray: Any, reference: Any, group: list[Task], report: Report) -> list[Task]:
    """Say how the cells of a task ended; returns those that it never came to."""
    try:
        messages = ray.get(reference)
    except ray.exceptions.RayError as error:
        return _report_loss(group, " ".join(str(error).split())[:300], report)
    for message in messages:
        report(message)
    return []


def _report_loss(group: list[Task], why: str, report: Report) -> list[Task]:
    """A task was lost with its process: what is in the folders tells which cell it was at."""
    for position, task in enumerate(group):
        ending = ended(task)
        report(Progress(task.index, ending=ending or Ending("failed", error=why)))
        if ending is None:
            return group[position + 1 :]
    return []
