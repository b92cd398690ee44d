"""The tutorial "Three hospitals, an afternoon" with every command as it is printed, on this machine.

Blocks of the language "sh" run in the folder that their title names, in the order of the page; blocks of "toml" are
files. A block that begins with "# keeps running" is a process, which the test ends at the end. A round waits for all
parties here, however slow the machine is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr.app")

from normec.federation.flower.doctor import examine
from normec.federation.flower.party_file import load_party_file
from normec.federation.flower.superlink_database import party_activity
from normec.federation.local.processes import free_port
from normec.federation.protocol.policy import load_policy
from normec.federation.protocol.run_status import run_status
from normec.federation.protocol.spending import spending

from ..federation.party_files import make_ssh_key
from ..support.waiting import LIMIT, wait_for
from ..test_guides import blocks

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "three-hospitals-afternoon.md"
MACHINES = ("server", "north", "south", "east")
SERVICE = "# keeps running\n"


class Afternoon:
    """The folders of the page, and the processes that keep running."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.running: list[subprocess.Popen[bytes]] = []
        for name in ("home", "bin", *MACHINES):
            (folder / name).mkdir()
        scripts = Path(sys.executable).parent
        (folder / "bin" / "normec").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m normec "$@"\n')
        (folder / "bin" / "normec").chmod(0o755)
        self.environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PATH": os.pathsep.join([str(folder / "bin"), str(scripts), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        }
        self.environment.pop("FLWR_HOME", None)

    def play(self, language: str, title: str, text: str) -> None:
        text = text.replace("9092", str(self.port))
        text = re.sub(r"^round_seconds = .*", f"round_seconds = {LIMIT}", text, flags=re.MULTILINE)
        if language == "toml":
            (self.folder / title).write_text(text)
        elif text.startswith(SERVICE):
            self._start(title, text)
        elif language == "sh":
            done = self.command(title, text)
            assert done.returncode == 0, f"{title}: {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def command(self, machine: str, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=self.folder / machine,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    def _start(self, machine: str, text: str) -> None:
        log = (self.folder / machine / "log").open("ab")
        whole = "exec " + text.removeprefix(SERVICE) if "=$PWD" not in text else text.removeprefix(SERVICE)
        process = subprocess.Popen(
            ["bash", "-c", whole],
            cwd=self.folder / machine,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(process)
        if machine == "server":
            wait_for(self._listening, "the SuperLink listens")

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def afternoon(tmp_path: Path) -> Iterator[Afternoon]:
    found = Afternoon(tmp_path, free_port())
    try:
        yield found
    finally:
        found.end()


@pytest.mark.slow
def test_every_command_of_the_tutorial(afternoon: Afternoon) -> None:
    for language, title, text in blocks(PAGE):
        afternoon.play(language, title, text)
    folder = afternoon.folder
    summary = json.loads((folder / "server" / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (folder / "server" / "run" / "report.html").exists()
    assert summary["privacy"]["epsilon"] <= 3.0
    assert summary["final"]["accuracy"] > 0.6
    assert 0.5 <= summary["majority"] < 0.8
    found = run_status(folder / "server" / "run")
    assert [party.accepted for party in found.parties] == [20, 20, 20]
    online = party_activity(folder / "server" / "superlink.db")
    assert [online[party.name].online for party in found.parties] == [True, True, True]
    # ε of each party as the server knows it is what the party itself has spent.
    for machine, party in zip(MACHINES[1:], found.parties, strict=True):
        own = spent(folder / machine)
        assert own["epsilon"] == pytest.approx(party.epsilon, rel=1e-6)
        assert own["refusals"] == {}
        lines = [json.loads(line) for line in (folder / machine / "log").read_text().splitlines()]
        assert any("waits for requests" in line["message"] for line in lines)
    check_doctor(afternoon)


def spent(folder: Path) -> dict[str, Any]:
    return spending(folder / "state", load_policy(folder / "policy.toml"))


def check_doctor(afternoon: Afternoon) -> None:
    """Make mistakes on purpose, and check that the doctor names each of them."""
    north = afternoon.folder / "north"
    (north / "party").chmod(0o644)
    (north / "poor-policy.toml").write_text((north / "policy.toml").read_text().replace("4.0", "3.5"))
    make_ssh_key(north / "stranger")
    for change, check, cure in (
        ({}, "key", "chmod 600"),
        ({"key": north / "stranger"}, "registration", "register"),
        ({"superlink": f"127.0.0.2:{afternoon.port}"}, "server", ""),
        ({"superlink": f"localhost:{free_port()}"}, "server", "is the SuperLink running?"),
        ({"root_certificates": north / "party.pub"}, "authority", "is not a certificate"),
        ({"policy": north / "poor-policy.toml"}, "terms terms.json", "would be refused (budget)"),
        ({"data": north / "heart" / "table.toml"}, "data", "is not a table"),
    ):
        found = {one.check: one for one in examine(load_party_file(north / "party.toml", change))}
        assert found[check].state == "problem", (change, found)
        assert cure in found[check].text, found[check]
        if not change:
            assert found["clock"].state == found["versions"].state == found["registration"].state == "ok"
    ahead = {one.check: one for one in examine(load_party_file(north / "party.toml"), lambda: time.time() + 60)}
    assert "s ahead of the server's" in ahead["clock"].text
