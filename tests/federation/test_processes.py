"""Processes that end when we end, also those that their children put into sessions of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from normec.federation.local.processes import Processes, free_port

from ..support.waiting import alive, wait_for

# A child that starts a grandchild in another session, deaf to SIGTERM, then waits; both say that they are there.
FAMILY = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "grandchild"], start_new_session=True)
open(f"{sys.argv[1]}/{'grand' if len(sys.argv) > 2 else ''}child", "w").close()
signal.pause()
"""
LAUNCHER = """
import signal, sys
from pathlib import Path
from normec.federation.local.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("child", [sys.executable, "-c", "import signal; signal.pause()"])
    print(*processes.marked(), flush=True)
    signal.pause()
"""


def test_stop_ends_descendants_in_other_sessions(tmp_path: Path) -> None:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    with Processes(tmp_path) as processes:
        processes.start("child", [sys.executable, str(script), str(tmp_path)])
        wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "grandchild").exists(), "the family")
        family = processes.marked()
        assert len(family) == 2
        processes.stop(patience=2.0)
        assert processes.marked() == []
    assert not any(alive(pid) for pid in family)


def test_a_killed_parent_takes_its_processes_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        children = [int(pid) for pid in launcher.stdout.readline().split()]
        launcher.send_signal(signal.SIGKILL)
    assert children
    wait_for(lambda: not any(alive(pid) for pid in children), "the end of the children")


def test_what_a_process_says_and_how_it_ends(tmp_path: Path) -> None:
    with Processes(tmp_path, {"WORD": "hello"}) as processes:
        processes.start("speaker", [sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"])
        wait_for(lambda: processes.ended("speaker") is not None, "the speaker's end")
        assert processes.ended("speaker") == 3
        assert processes.log_tail("speaker") == "hello"


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
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
