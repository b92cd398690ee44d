"""Processes that are killed: whoever started them goes, they go too, and it is said which signal ended them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from normec.federation.local.processes import Processes, Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc are Linux's")
HANG = 120.0  # seconds; only a hang reaches it

# Starts a child, which starts a grandchild in a session of its own; both deaf to SIGTERM. Each says its number.
LAUNCHER = """
import sys, time
from pathlib import Path
from normec.federation.local.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("child", [sys.executable, sys.argv[2]], {"SAY": sys.argv[3]})
    time.sleep(600)
"""
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
with open(os.environ["SAY"], "w") as pipe:
    pipe.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def numbers(pipe: Path, count: int) -> list[int]:
    """So many numbers that processes write into a pipe; fails where they do not come."""
    handle, text = os.open(pipe, os.O_RDWR), b""  # writing too: then opening waits for nobody
    while text.count(b"\n") < count:
        assert wait([handle], HANG), "a process did not say its number"
        text += os.read(handle, 64)
    os.close(handle)
    return [int(line) for line in text.split()]


def ends(watch: Watch) -> bool:
    """Wait for a process's end."""
    return bool(wait([watch.handle], HANG))


def test_a_killed_launcher_takes_its_grandchildren_along(tmp_path: Path) -> None:
    script, pipe = tmp_path / "family.py", tmp_path / "pipe"
    script.write_text(FAMILY)
    os.mkfifo(pipe)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), str(script), str(pipe)])
    family = [Watch(pid) for pid in numbers(pipe, 2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(HANG)
    assert all(map(ends, family))


def test_it_is_said_how_a_process_ended(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("killed", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        processes.start("failed", [sys.executable, "-c", "print('no data'); raise SystemExit(3)"])
        while processes.ended("killed") is None or processes.ended("failed") is None:
            processes.wait(HANG)
        assert "killed was killed by SIGKILL; its log" in processes.describe_exit("killed")
        assert "failed ended with exit code 3; its log" in processes.describe_exit("failed")
        assert processes.describe_exit("failed").endswith("no data")


def test_a_descendant_is_found_by_its_program_and_its_end_is_an_event(tmp_path: Path) -> None:
    program, pipe = tmp_path / "some-server", tmp_path / "pipe"
    program.write_text(FAMILY)
    os.mkfifo(pipe)
    with Processes(tmp_path) as processes:
        processes.start("child", [sys.executable, str(program), "alone"], {"SAY": str(pipe)})
        (pid,) = numbers(pipe, 1)
        found = processes.find("some-server")
        assert found is not None
        assert (found.pid, found.ended) == (pid, False)
        assert processes.find("some-other-server") is None
        os.kill(pid, signal.SIGKILL)
        processes.wait(HANG, found)
        assert ends(found)
        assert found.ended
        found.close()


def test_nothing_is_left_of_the_keeper(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        watchdog = processes._watchdog
        assert watchdog is not None
        assert watchdog.poll() is None
    assert watchdog.poll() == 0
