"""The processes of a federation, forked from one that has made their imports, so that they start at once.

A test with many parties and runs, which are killed and started again, would mostly import torch and Flower. Everything
after the imports is that of the commands; `test_command.py` and `test_tutorial.py` start them as they are.

The kernel shows the command line and the environment of the process that was there before the fork. Therefore each
process is also a file in a folder, FORKS in the environment: its name is the process number, its text the command line.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from normec.federation.local.processes import Processes, Watch
from normec.system.files import PRIVATE_FILE

from ..support.forks import ForkedPopen, end_with_us
from ..support.waiting import alive, wait_for

FORKS = "NORMEC_TEST_FORKS"
OURS = [sys.executable, "-m", "normec", "federation"]


def living(folder: Path) -> dict[int, str]:
    """The living processes that were recorded in a folder: number → command line."""
    recorded = {int(path.name): path.read_text() for path in folder.iterdir()} if folder.exists() else {}
    return {pid: line for pid, line in recorded.items() if alive(pid)}


def record(pid: int, words: Sequence[str], folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / str(pid)).write_text(shlex.join(words))


class RecordedPopen(ForkedPopen):
    """A forked process in the folder of the environment."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(args, env=env, **more)
        record(self.pid, args, (os.environ if env is None else env)[FORKS])


class PopenUntilDeath(RecordedPopen):
    """A forked process that ends with its parent."""

    @staticmethod
    def _be(*given: Any) -> None:
        end_with_us()
        ForkedPopen._be(*given)


def _become(words: list[str], log: Path, environment: dict[str, str]) -> None:
    """Become the process of a command that the server of forks has started; it ends with the server."""
    end_with_us()
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    from normec.cli.app import run

    sys.exit(run(words))


class ServedFork:
    """A process of the server of forks with those functions of a `subprocess.Popen` that `Processes` uses."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "tests.federation_network.parts.federation_imports"])
        self._process: ForkServerProcess = context.Process(target=_become, args=(words, log, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        wait_for(self._leads_a_group, "a forked process to begin")  # signals are sent to its group

    def _leads_a_group(self) -> bool:
        return self.poll() is not None or os.getpgid(self.pid) == self.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return code


class ForkedProcesses(Processes):
    """Processes of which our commands are forked, and the programs that these start.

    Args:
        logs: The folder of logs.
        environment: Variables of all processes.
        served: Whether a server forks them, or (False) this process, which must have made the imports.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None, served: bool = False) -> None:
        self.forks = logs / "forks"
        super().__init__(logs, {**(environment or {}), FORKS: str(self.forks)})
        self._served = served

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        if list(command[: len(OURS)]) != OURS:
            return super().start(name, command, environment)
        log, variables = self.log(name), {**self._environment, **(environment or {})}
        self._log_begins[name] = log.stat().st_size if log.exists() else 0
        if self._served:
            process: Any = ServedFork(list(command[3:]), log, variables)
            record(process.pid, command, str(self.forks))
        else:
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
            with os.fdopen(handle, "ab") as file:
                process = PopenUntilDeath(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
        self._started[name] = cast(Any, process)
        return int(process.pid)

    def find(self, program: str) -> Watch | None:
        """A living process that runs a program with this name."""
        for pid, line in living(self.forks).items():
            if Path(shlex.split(line)[0]).name == program:
                return Watch(pid)
        return super().find(program)

    def marked(self) -> list[int]:
        return [*super().marked(), *living(self.forks)]
