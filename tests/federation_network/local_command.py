"""The command `normec federation local` as a process, and the processes that belong to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..support.forks import ROOT, Fork
from .forked_processes import living

DIGITS = ("--data", "digits", "--parties", "2", "--rounds", "3")
MARK = "NORMEC_TEST_RUN"  # in the environment of the command, from which all its processes inherit it


def arguments(out: Path, data: Sequence[str] | None = DIGITS) -> list[str]:
    """The arguments of `normec` for two parties with digits, for other data, or (None) for its own example."""
    return ["federation", "local", "--quiet", "--json", "--out", str(out), *(data or ())]


def started(out: Path, *more: str, data: Sequence[str] | None = DIGITS) -> subprocess.Popen[str]:
    """Start the command on two parties with digits, on other data, or (None) on its own example."""
    command = [sys.executable, "-m", "normec", *arguments(out, data), *more]
    environment = {**os.environ, MARK: str(out)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def forked(out: Path, *more: str, data: Sequence[str] | None = DIGITS) -> Fork:
    """The same with all its processes forked, where a test is about what happens after they have begun."""
    return Fork(["-m", "tests.federation_network.forked_command", *arguments(out, data), *more], ROOT)


def running(out: Path) -> dict[int, str]:
    """The living processes of a run: number → command line."""
    found, wanted = living(out / "federation" / "logs" / "forks"), f"{MARK}={out}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line:  # a zombie has none
                    found[int(entry.name)] = line
        except OSError:
            continue
    return found
