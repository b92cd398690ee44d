"""Measure implementations one after the other, each in a new process, and repeat the whole list.

A new process per measurement makes peak memory and start-up time meaningful. The list is repeated instead of each
implementation, so that drifts of the machine affect all implementations.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import normec
from normec import UsageError
from normec.errors import at_least, positive

from .implementations import PEERS, Implementation
from .workloads import Case

Outcome = dict[str, Any]

_FIND = (
    "import importlib.metadata as m, json\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({n: v(n) for n in %r}))"
)


@dataclass(frozen=True)
class Limits:
    """At most `rounds` timed rounds or `seconds` per process, in `repeats` processes of at most `limit` seconds."""

    rounds: int = 200
    seconds: float = 5.0
    repeats: int = 3
    limit: float = 300.0

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, repeats=self.repeats)
        positive(seconds=self.seconds, limit=self.limit)


@dataclass
class Measured:
    """A case and the outcomes of its implementations, one per process."""

    case: Case
    outcomes: dict[Implementation, list[Outcome]] = field(default_factory=dict)


class Runner:
    """Starts processes with the right Python, environment and limits."""

    def __init__(self, limits: Limits, peer_python: str | None, folder: Path) -> None:
        self.limits, self.folder = limits, folder
        self.peer_python = peer_python or sys.executable
        link = folder / "package"
        link.mkdir()
        (link / "normec").symlink_to(Path(normec.__file__).resolve().parent)
        (link / "benchmarks").symlink_to(Path(__file__).resolve().parents[1])
        self._package = str(link)
        self.installed = self._installed()

    def measure(self, case: Case, implementation: Implementation) -> Outcome:
        """Measure an implementation in one process."""
        if implementation.needs is not None and self.installed[implementation.needs] is None:
            return {"status": "not installed", "reason": f"{self.peer_python} has no {implementation.needs}"}
        request, answer, log = (self.folder / name for name in ("request.json", "answer.json", "log.txt"))
        answer.unlink(missing_ok=True)
        started = time.time()
        asked = {
            "case": case.to_dict(),
            "implementation": implementation.to_dict(),
            "rounds": self.limits.rounds,
            "seconds": self.limits.seconds,
            "started": started,
        }
        request.write_text(json.dumps(asked))
        python = sys.executable if implementation.needs is None else self.peer_python
        with log.open("w") as output:
            child = subprocess.Popen(
                [python, "-m", "benchmarks.speed.worker", str(request), str(answer)],
                env=self._environment(case),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            with _ended(child):
                held = self._watch(child, started, whole=implementation.processes)
        found: Outcome = json.loads(answer.read_text()) if answer.exists() else {"status": "failed", "times": []}
        if found["status"] == "stopped" or not answer.exists():
            found |= _unfinished(child.returncode, time.time() - started >= self.limits.limit, self.limits.limit, log)
        if implementation.processes:
            found["peak_bytes"] = max(held, found.get("peak_bytes", 0))
        return found

    def _watch(self, child: subprocess.Popen[bytes], started: float, *, whole: bool) -> int:
        """Wait for the end or the limit; with `whole`, return the peak memory of the process and its descendants."""
        held = 0
        while (left := started + self.limits.limit - time.time()) > 0:
            try:
                child.wait(min(left, 0.5) if whole else left)
                break
            except subprocess.TimeoutExpired:
                held = max(held, family_bytes(child.pid)) if whole else 0
        return held

    def _environment(self, case: Case) -> dict[str, str]:
        threads = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        # An empty cache, so that the time of the first compilation is measured.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        path = {"PYTHONPATH": self._package}
        return {**os.environ, **threads, **cache, **path}

    def _installed(self) -> dict[str, str | None]:
        try:
            done = subprocess.run(
                [self.peer_python, "-c", _FIND % list(PEERS.values())], capture_output=True, text=True
            )
            found: dict[str, str | None] = json.loads(done.stdout)
        except (OSError, ValueError):
            raise UsageError(f"{self.peer_python} is not a working Python; give the path of one") from None
        return found


@contextmanager
def runner(limits: Limits, peer_python: str | None) -> Iterator[Runner]:
    """A runner whose folder and processes are removed at the end, also after SIGTERM."""
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if alone else None
    try:
        with tempfile.TemporaryDirectory(prefix="normec-bench-", ignore_cleanup_errors=True) as folder:
            yield Runner(limits, peer_python, Path(folder))
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)


def measure_all(
    runner: Runner,
    case: Case,
    implementations: list[Implementation],
    log: Callable[[str], object],
    after: Callable[[Measured], object],
) -> tuple[Measured, bool]:
    """Measure the whole list several times; returns the outcomes and whether Ctrl-C was pressed.

    An implementation that failed is not measured again.
    """
    found = Measured(case, {implementation: [] for implementation in implementations})
    try:
        for repeat in range(runner.limits.repeats):
            for implementation, outcomes in found.outcomes.items():
                if any(outcome["status"] != "measured" for outcome in outcomes):
                    continue
                log(f"{case.workload}, n = {case.clients}, {case.precision}: {implementation.name}, {repeat + 1}")
                outcomes.append(runner.measure(case, implementation))
                after(found)
    except KeyboardInterrupt:
        return found, True
    return found, False


def family_bytes(root: int) -> int:
    """The memory of a process and its descendants, with shared pages counted once; 0 without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _unfinished(code: int | None, late: bool, limit: float, log: Path) -> Outcome:
    if late:
        return {"status": "stopped", "reason": f"stopped after {limit:g} s"}
    if code == -signal.SIGKILL:
        return {"status": "failed", "reason": "killed, probably because memory ran out"}
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"status": "failed", "reason": (lines or [f"ended with code {code}"])[-1][:300]}


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process group of the child at the end of the block."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
