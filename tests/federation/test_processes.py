"""Processes that end when we end, also those that their children put into sessions of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from normec.federation.processes import Processes, free_port

# A child that starts a grandchild in another session, deaf to SIGTERM, then waits; both say that they are there.
FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "grandchild"], start_new_session=True)
open(f"{sys.argv[1]}/{'grand' if len(sys.argv) > 2 else ''}child", "w").close()
time.sleep(600)
"""
LAUNCHER = """
import sys, time
from pathlib import Path
from normec.federation.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("child", [sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(sys.argv[1]) / "ready").write_text("\\n".join(map(str, processes.marked())))
    time.sleep(600)
"""


def wait_for(paths: list[Path]) -> None:
    until = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stop_ends_descendants_in_other_sessions(tmp_path: Path) -> None:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    with Processes(tmp_path) as processes:
        processes.start("child", [sys.executable, str(script), str(tmp_path)])
        wait_for([tmp_path / "child", tmp_path / "grandchild"])
        family = processes.marked()
        assert len(family) == 2
        processes.stop(patience=2.0)
        assert processes.marked() == []
    assert not any(alive(pid) for pid in family)


def test_a_killed_parent_takes_its_processes_along(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    wait_for([tmp_path / "ready"])
    until = time.monotonic() + 120
    while not (children := [int(pid) for pid in (tmp_path / "ready").read_text().split()]):
        assert time.monotonic() < until
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while any(alive(pid) for pid in children):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_process_says_and_how_it_ends(tmp_path: Path) -> None:
    with Processes(tmp_path, {"WORD": "hello"}) as processes:
        processes.start("speaker", [sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"])
        until = time.monotonic() + 120
        while processes.ended("speaker") is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert processes.ended("speaker") == 3
        assert processes.last_words("speaker") == "hello"


def test_free_ports_can_be_bound() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
