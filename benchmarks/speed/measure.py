"""Contestants one after the other, each in a fresh process, the whole list several times over.

A fresh process a measurement makes peak memory and start-up time true; repeating the list, and not each contestant,
lets whatever drifts on the machine hit all alike.
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
from normec.errors import UsageError, at_least, positive

from .contestants import PEERS, Contestant
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
class Effort:
    """How long to look: `rounds` timed rounds a process or `seconds` of them, whichever ends first, in `repeats`
    processes; a process that takes longer than `limit` seconds in all is stopped."""

    rounds: int = 200
    seconds: float = 5.0
    repeats: int = 3
    limit: float = 300.0

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, repeats=self.repeats)
        positive(seconds=self.seconds, limit=self.limit)


@dataclass
class Measured:
    """A case and what its contestants did, one outcome a process."""

    case: Case
    outcomes: dict[Contestant, list[Outcome]] = field(default_factory=dict)


class Arena:
    """Where processes start: which Python, in which surroundings, with what limits."""

    def __init__(self, effort: Effort, peer_python: str | None, folder: Path) -> None:
        self.effort, self.folder = effort, folder
        self.peer_python = peer_python or sys.executable
        link = folder / "package"
        link.mkdir()
        (link / "normec").symlink_to(Path(normec.__file__).resolve().parent)
        (link / "benchmarks").symlink_to(Path(__file__).resolve().parents[1])
        self._package = str(link)
        self.installed = self._installed()

    def measure(self, case: Case, contestant: Contestant) -> Outcome:
        """One process from its start to its end."""
        if contestant.needs is not None and self.installed[contestant.needs] is None:
            return {"status": "not installed", "reason": f"{self.peer_python} has no {contestant.needs}"}
        request, answer, log = (self.folder / name for name in ("request.json", "answer.json", "log.txt"))
        answer.unlink(missing_ok=True)
        started = time.time()
        asked = {
            "case": case.to_dict(),
            "contestant": contestant.to_dict(),
            "rounds": self.effort.rounds,
            "seconds": self.effort.seconds,
            "started": started,
        }
        request.write_text(json.dumps(asked))
        python = sys.executable if contestant.needs is None else self.peer_python
        with log.open("w") as output:
            child = subprocess.Popen(
                [python, "-m", "benchmarks.speed.child", str(request), str(answer)],
                env=self._surroundings(case),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            with _ended(child):
                held = self._watch(child, started, whole=contestant.processes)
        found: Outcome = json.loads(answer.read_text()) if answer.exists() else {"status": "failed", "times": []}
        if found["status"] == "stopped" or not answer.exists():
            found |= _unfinished(child.returncode, time.time() - started >= self.effort.limit, self.effort.limit, log)
        if contestant.processes:
            found["peak_bytes"] = max(held, found.get("peak_bytes", 0))
        return found

    def _watch(self, child: subprocess.Popen[bytes], started: float, *, whole: bool) -> int:
        """Wait for the end or the limit; the most memory of the whole family of processes, where that is asked for."""
        held = 0
        while (left := started + self.effort.limit - time.time()) > 0:
            try:
                child.wait(min(left, 0.5) if whole else left)
                break
            except subprocess.TimeoutExpired:
                held = max(held, family_bytes(child.pid)) if whole else 0
        return held

    def _surroundings(self, case: Case) -> dict[str, str]:
        threads = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        # A cache of its own: the first compilation of a benchmark is a first compilation.
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
            raise UsageError(f"{self.peer_python} is not a Python that can be asked what is installed") from None
        return found


@contextmanager
def arena(effort: Effort, peer_python: str | None) -> Iterator[Arena]:
    """An arena whose folder and processes are gone afterwards, also where the benchmark is told to end."""
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if alone else None
    try:
        with tempfile.TemporaryDirectory(prefix="normec-bench-", ignore_cleanup_errors=True) as folder:
            yield Arena(effort, peer_python, Path(folder))
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)


def compete(
    place: Arena,
    case: Case,
    contestants: list[Contestant],
    say: Callable[[str], object],
    after: Callable[[Measured], object],
) -> tuple[Measured, bool]:
    """The whole list, several times; whoever could not finish is not asked again. Ctrl-C ends it: then True."""
    found = Measured(case, {contestant: [] for contestant in contestants})
    try:
        for repeat in range(place.effort.repeats):
            for contestant, outcomes in found.outcomes.items():
                if any(outcome["status"] != "measured" for outcome in outcomes):
                    continue
                say(f"{case.workload}, n = {case.clients}, {case.precision}: {contestant.name}, {repeat + 1}")
                outcomes.append(place.measure(case, contestant))
                after(found)
    except KeyboardInterrupt:
        return found, True
    return found, False


def family_bytes(root: int) -> int:
    """The memory of a process and its descendants, shared pages counted once; 0 where /proc is not to be had."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
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
        return {"status": "failed", "reason": "killed, as the system does when memory runs out"}
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"status": "failed", "reason": (said or [f"ended with code {code}"])[-1][:300]}


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Nothing of the child's family outlives the block."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
