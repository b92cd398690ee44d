"""Parties as processes that are forked from one that has imported what a party needs, so that they start at once.

A test with many parties, which are killed and started again, would mostly import torch and Flower. Everything after the
imports is that of the command `normec federation party`; `test_command.py` and `test_tutorial.py` start it as it is.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from normec.federation.local.processes import Processes
from normec.system.files import PRIVATE_FILE

from ..support.waiting import wait_for

PARTY = [sys.executable, "-m", "normec", "federation", "party"]


def _run_party(words: list[str], log: Path, environment: dict[str, str]) -> None:
    """Become the process of a party, which ends with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    from normec.cli.app import run

    sys.exit(run(words))


class ForkedParty:
    """A forked process with those functions of a `subprocess.Popen` that `Processes` uses."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "tests.federation_network.parts.party_imports"])
        self._process: ForkServerProcess = context.Process(target=_run_party, args=(words, log, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        wait_for(self._leads_a_group, "a forked party to begin")  # signals are sent to its group

    def _leads_a_group(self) -> bool:
        return self.poll() is not None or os.getpgid(self.pid) == self.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("party", timeout)
        return code


class ProcessesWithForkedParties(Processes):
    """Processes of which those of `normec federation party` are forked."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        if list(command[: len(PARTY)]) != PARTY:
            return super().start(name, command, environment)
        log = self.log(name)
        self._log_begins[name] = log.stat().st_size if log.exists() else 0
        party = ForkedParty(list(command[3:]), log, {**self._environment, **(environment or {})})
        self._started[name] = cast(Any, party)
        return party.pid
