"""Measure one implementation in its own process: `python -m benchmarks.speed.worker REQUEST ANSWER`, two JSON files.

The answer is updated while rounds run, so that an implementation that is stopped at the time limit has results as well.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from normec import UsageError
from normec.system.files import write_atomic


def main(request: Path, answer: Path) -> None:
    asked = json.loads(request.read_text())
    _confine(asked["case"]["threads"])
    import torch

    from .clock import Clock
    from .implementations import Implementation
    from .workloads import Case

    case, implementation = Case(**asked["case"]), Implementation(**asked["implementation"])
    torch.set_num_threads(case.threads)
    on_gpu = case.device != "cpu"
    facts: dict[str, Any] = {"status": "stopped", "versions": _versions(implementation.needs)}
    making = 0.0
    turn = socket.socket(fileno=asked["turn"]) if asked["turn"] is not None else None
    timing = time.time(), _waited()

    def begin() -> None:
        nonlocal timing
        facts["ready"] = time.time() - asked["started"]
        if turn is not None:
            turn.sendall(b"r")
            turn.recv(1)
        timing = time.time(), _waited()

    def end() -> None:
        if turn is not None:
            turn.sendall(b"d")

    def report() -> None:
        facts["times"] = clock.times
        if clock.first_round_end is not None and turn is None:
            facts["start_up"] = clock.first_round_end - asked["started"] - making
        facts["peak_bytes"] = _peak()
        facts["waited"] = (_waited() - timing[1]) / max(time.time() - timing[0], 1e-9)
        facts["device_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else None
        write_atomic(answer, json.dumps(facts))

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    clock = Clock(
        asked["rounds"],
        asked["seconds"],
        wait=wait,
        block=5 if on_gpu else 1,
        report=report,
        begin=begin,
        end=end,
        warm_up=max(10.0, asked["seconds"]) if on_gpu else None,  # graphs are recorded after the first round
    )
    try:
        began = time.time()
        data = implementation.data(case)
        making = time.time() - began
        facts["note"] = implementation.run(data, clock)
        facts["status"] = "measured"
    except UsageError as error:
        facts |= {"status": "does not apply", "reason": str(error)}
    except Exception as error:  # an error of another library is a row of the table
        facts |= {"status": "failed", "reason": _message(error)}
    report()
    sys.stdout.flush()
    os._exit(0)  # do not wait for the exit handlers of libraries


def _message(error: BaseException) -> str:
    """The first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _confine(threads: int) -> None:
    """Restrict the process to the same cores for every implementation."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _peak() -> int:
    """Peak memory of this process; ru_maxrss would include that of its parent before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _waited() -> float:
    """Seconds in which the main thread was ready but had no core, because other processes used it; 0 if unknown."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def _versions(needs: str | None) -> dict[str, str]:
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    return found | ({needs: importlib.metadata.version(needs)} if needs is not None else {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
