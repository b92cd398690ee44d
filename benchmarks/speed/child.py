"""One contestant in a process of its own: `python -m benchmarks.speed.child REQUEST ANSWER`, two JSON files.

The answer is written anew as rounds go by, so that a contestant stopped for its slowness has not run in vain.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from normec.errors import UsageError
from normec.system.files import write_atomic


def main(request: Path, answer: Path) -> None:
    asked = json.loads(request.read_text())
    _confine(asked["case"]["threads"])
    import torch

    from .clock import Clock
    from .contestants import Contestant
    from .workloads import Case

    case, contestant = Case(**asked["case"]), Contestant(**asked["contestant"])
    torch.set_num_threads(case.threads)
    on_gpu = case.device != "cpu"
    facts: dict[str, Any] = {"status": "stopped", "versions": _versions(contestant.needs)}
    making = 0.0

    def report() -> None:
        facts["times"] = clock.times
        if clock.first is not None:
            facts["start_up"] = clock.first - asked["started"] - making
        facts["peak_bytes"] = _peak()
        facts["waited"] = _waited() / (time.time() - asked["started"])
        facts["device_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else None
        write_atomic(answer, json.dumps(facts))

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    clock = Clock(asked["rounds"], asked["seconds"], wait=wait, block=5 if on_gpu else 1, report=report)
    try:
        began = time.time()
        material = contestant.material(case)
        making = time.time() - began
        facts["note"] = contestant.run(material, clock)
        facts["status"] = "measured"
    except UsageError as error:
        facts |= {"status": "does not apply", "reason": str(error)}
    except Exception as error:  # whatever another library raises: it is a line of the table, not our end
        facts |= {"status": "failed", "reason": _said(error)}
    report()
    sys.stdout.flush()
    os._exit(0)  # what a library does at its exit is not waited for


def _said(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _confine(threads: int) -> None:
    """Every contestant gets the same cores, whatever it uses to find out how many there are."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _peak() -> int:
    """The most memory this process held. ru_maxrss would count what it was forked from."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _waited() -> float:
    """Seconds that the main thread was ready but had no core: others were using the machine. 0 where none tells."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def _versions(needs: str | None) -> dict[str, str]:
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    return found | ({needs: importlib.metadata.version(needs)} if needs is not None else {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
