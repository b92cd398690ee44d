"""Processes that end with the one that started them, in whatever session they are, and what is said of their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from normec.federation.local.processes import Processes, Watch, free_port

from ..support.waiting import LIMIT, wait_for

linux = pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc are Linux's")

# Starts a grandchild in a session of its own. Both ignore SIGTERM, and write their numbers into a pipe.
FAMILY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
with open(os.environ["PIPE"], "w") as pipe:
    pipe.write(f"{os.getpid()}\\n")
signal.pause()
"""
LAUNCHER = """
import signal, sys
from pathlib import Path
from normec.federation.local.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("child", [sys.executable, sys.argv[2]], {"PIPE": sys.argv[3]})
    signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "family"
    path.write_text(FAMILY)
    return path


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def numbers(pipe: Path, count: int) -> list[int]:
    """Wait for so many numbers that processes write into a pipe."""
    handle, text = os.open(pipe, os.O_RDWR), b""  # for writing too, so that opening waits for nobody
    while text.count(b"\n") < count:
        assert wait([handle], LIMIT), "a process did not write its number"
        text += os.read(handle, 64)
    os.close(handle)
    return [int(line) for line in text.split()]


def ends(watch: Watch) -> bool:
    """Wait for the end of a process."""
    return bool(wait([watch.handle], LIMIT))


@linux
def test_stop_ends_descendants_in_other_sessions(tmp_path: Path, script: Path, pipe: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("child", [sys.executable, str(script)], {"PIPE": str(pipe)})
        family = [Watch(pid) for pid in numbers(pipe, 2)]
        assert sorted(processes.marked()) == sorted(watch.pid for watch in family)
        processes.stop(patience=2.0)
        assert all(map(ends, family))
        assert processes.marked() == []


@linux
def test_a_killed_launcher_takes_its_grandchildren_along(tmp_path: Path, script: Path, pipe: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), str(script), str(pipe)])
    family = [Watch(pid) for pid in numbers(pipe, 2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(LIMIT)
    assert all(map(ends, family))


@linux
def test_it_is_said_how_a_process_ended(tmp_path: Path) -> None:
    with Processes(tmp_path, {"WORDS": "no data"}) as processes:
        processes.start("killed", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        failing = "import os; print(os.environ['WORDS']); raise SystemExit(3)"
        processes.start("failed", [sys.executable, "-c", failing])
        while processes.ended("killed") is None or processes.ended("failed") is None:
            processes.wait(LIMIT)
        assert processes.ended("failed") == 3
        assert processes.log_tail("failed") == "no data"
        assert "killed was killed by SIGKILL; its log" in processes.describe_exit("killed")
        assert "failed ended with exit code 3; its log" in processes.describe_exit("failed")
        assert processes.describe_exit("failed").endswith("no data")


@linux
def test_a_descendant_is_found_by_its_program_and_its_end_is_an_event(tmp_path: Path, script: Path, pipe: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("child", [sys.executable, str(script), "alone"], {"PIPE": str(pipe)})
        (pid,) = numbers(pipe, 1)
        found = processes.find("family")
        assert found is not None
        assert (found.pid, found.ended) == (pid, False)
        assert processes.find("another-family") is None
        os.kill(pid, signal.SIGKILL)
        processes.wait(LIMIT, found)
        assert ends(found)
        assert found.ended
        found.close()


@linux
def test_the_watchdog_ends_with_the_context(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        watchdog = processes._watchdog
        assert watchdog is not None
        assert watchdog.poll() is None
    assert watchdog.poll() == 0


def test_a_log_is_searched_from_the_start_of_its_process(tmp_path: Path) -> None:
    """The log of an earlier process says nothing about this one; a word is found however many lines follow it."""
    say = "import sys; print(sys.argv[1]); print('line\\n' * 1000)"
    with Processes(tmp_path) as processes:
        for word, other in (("first", "second"), ("second", "first")):
            processes.start("speaker", [sys.executable, "-c", say, word])
            wait_for(lambda: processes.ended("speaker") is not None, "the speaker's end")
            assert processes.has_logged("speaker", ["nothing", word])
            assert not processes.has_logged("speaker", ["nothing", other])


def test_free_ports_can_be_bound() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
