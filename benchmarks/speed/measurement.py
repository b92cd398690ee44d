"""Measure implementations, each in a new process, one after the other or with several that get ready at once.

A new process per measurement makes peak memory and start-up time meaningful. The list is repeated instead of each
implementation, so that drifts of the machine affect all implementations. On a GPU most of the time goes into importing
and compiling, so several processes get ready at once there; while one is timed, the others are stopped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
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

_TICK = 0.05  # seconds between two looks at the processes
_DRAIN = 0.1  # seconds that the device has for the work that stopped processes had queued

_FIND = (
    "import importlib.metadata as m, json\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({n: v(n) for n in %r}))"
)


@dataclass(frozen=True)
class Limits:
    """At most `rounds` timed rounds or `seconds` per process, in `repeats` processes of at most `limit` seconds.

    Up to `beside` processes get ready at once; one at a time is timed.
    """

    rounds: int = 200
    seconds: float = 5.0
    repeats: int = 3
    limit: float = 300.0
    beside: int = 1

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, repeats=self.repeats, beside=self.beside)
        positive(seconds=self.seconds, limit=self.limit)


@dataclass
class Measured:
    """A case and the outcomes of its implementations, one per process."""

    case: Case
    outcomes: dict[Implementation, list[Outcome]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One process: the `repeat`-th measurement of an implementation."""

    case: Case
    implementation: Implementation
    repeat: int = 0

    def __str__(self) -> str:
        case = self.case
        return f"{case.workload}, n = {case.clients}, {case.precision}: {self.implementation.name}, {self.repeat + 1}"


class _Child:
    """A process that measures, in a process group of its own; it asks for its turn through a socket."""

    def __init__(self, runner: Runner, task: Task, folder: Path) -> None:
        folder.mkdir()
        self.task, self._limit = task, runner.limits.limit
        self._answer, self._log = folder / "answer.json", folder / "log"
        self._started = time.time()
        self._ends = self._started + self._limit
        self._stopped_at: float | None = None
        self._held = 0
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        request = folder / "request.json"
        asked = {
            "case": task.case.to_dict(),
            "implementation": task.implementation.to_dict(),
            "rounds": runner.limits.rounds,
            "seconds": runner.limits.seconds,
            "started": self._started,
            "turn": theirs.fileno() if runner.limits.beside > 1 else None,
        }
        request.write_text(json.dumps(asked))
        python = sys.executable if task.implementation.needs is None else runner.peer_python
        with theirs, self._log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.speed.worker", str(request), str(self._answer)],
                env=runner.environment(task.case),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def heard(self) -> bytes:
        """What it said since the last call: "r" when it is ready, "d" when it is done."""
        with suppress(BlockingIOError, ConnectionError):
            return self._ours.recv(16)
        return b""

    def go(self) -> None:
        with suppress(OSError):  # it has ended
            self._ours.send(b"g")

    def stop(self) -> None:
        """Stop it; its time stands still."""
        if self._stopped_at is None:
            self._stopped_at = time.time()
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._stopped_at is not None:
            self._ends += time.time() - self._stopped_at
            self._stopped_at = None
            self._signal(signal.SIGCONT)

    def ended(self) -> bool:
        """Whether it has ended, or has had its time."""
        if self.task.implementation.processes:
            self._held = max(self._held, family_bytes(self._process.pid))
        return self._process.poll() is not None or self._late()

    def outcome(self) -> Outcome:
        """What it found, after its end."""
        late = self._late()
        self.close()
        answered = self._answer.exists()
        found: Outcome = json.loads(self._answer.read_text()) if answered else {"status": "failed", "times": []}
        if found["status"] == "stopped" or not answered:
            found |= _unfinished(self._process.returncode, late, self._limit, self._log)
        if self.task.implementation.processes:
            found["peak_bytes"] = max(self._held, found.get("peak_bytes", 0))
        return found

    def close(self) -> None:
        """Kill it and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._ours.close()

    def _late(self) -> bool:
        return self._stopped_at is None and time.time() >= self._ends

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


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

    def measure(
        self, tasks: Sequence[Task], skip: Callable[[Task], bool] = lambda _: False
    ) -> Generator[tuple[Task, Outcome], None, None]:
        """Carry out the tasks but those that `skip` names when their turn comes, and yield what ends."""
        waiting, children, timed = deque(enumerate(tasks)), list[_Child](), None
        ready: deque[_Child] = deque()
        try:
            while waiting or children:
                while waiting and timed is None and len(children) < self.limits.beside:
                    number, task = waiting.popleft()
                    if skip(task):
                        continue
                    needed, misfit = task.implementation.needs, task.implementation.misfit(task.case)
                    if misfit is not None:
                        yield task, {"status": "does not apply", "reason": misfit}
                    elif needed is not None and self.installed[needed] is None:
                        yield task, {"status": "not installed", "reason": f"{self.peer_python} has no {needed}"}
                    else:
                        children.append(_Child(self, task, self.folder / f"process-{number}"))
                for child in list(children):
                    said = child.heard()
                    if b"r" in said:
                        ready.append(child)
                    over = child.ended()
                    if child is timed and (over or b"d" in said):
                        timed = None
                        for other in children:
                            other.resume()
                    if over:
                        children.remove(child)
                        with suppress(ValueError):
                            ready.remove(child)
                        yield child.task, child.outcome()
                if timed is None and ready:
                    timed = ready.popleft()
                    for other in children:
                        if other is not timed:
                            other.stop()
                    time.sleep(_DRAIN)
                    timed.go()
                time.sleep(_TICK)
        finally:
            for child in children:
                child.close()

    def environment(self, case: Case) -> dict[str, str]:
        threads = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        # An empty cache, so that the time of the first compilation is measured.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        path = {"PYTHONPATH": self._package}
        # TorchInductor starts a process for each core, in each of those that get ready at once.
        beside = self.limits.beside
        compilers = (
            {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // beside))} if beside > 1 else {}
        )
        return {**os.environ, **threads, **cache, **compilers, **path}

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
    found: Sequence[Measured],
    log: Callable[[str], object],
    after: Callable[[Task, Outcome], object] = lambda *_: None,
) -> bool:
    """Measure what the cases in `found` lack, and add it there; returns whether Ctrl-C was pressed.

    An implementation that failed is not measured again.
    """
    outcomes = {(of.case, implementation): some for of in found for implementation, some in of.outcomes.items()}
    tasks = [
        Task(of.case, implementation, repeat)
        for of in found
        for repeat in range(runner.limits.repeats)
        for implementation, some in of.outcomes.items()
        if repeat >= len(some)
    ]
    if (
        runner.limits.beside > 1
    ):  # what takes longest to get ready begins first, so that nothing is left alone at the end
        tasks.sort(key=lambda task: not task.implementation.compiles)

    def needless(task: Task) -> bool:
        if any(outcome["status"] != "measured" for outcome in outcomes[task.case, task.implementation]):
            return True
        log(str(task))
        return False

    measuring = runner.measure(tasks, needless)
    try:
        for task, outcome in measuring:
            outcomes[task.case, task.implementation].append(outcome)
            after(task, outcome)
    except KeyboardInterrupt:
        return True
    finally:
        measuring.close()
    return False


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
