"""What a party, a server and a run keep on their disks is for their owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from normec.federation.local.certificates import make_key, make_server
from normec.federation.local.processes import Processes

from ..support.waiting import wait_for
from .faulty_network import settled


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> set[str]:
    """The names of files and folders that others than the owner may read, write or enter."""
    found = [folder, *folder.rglob("*")]
    return {path.name for path in found if path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)}


def test_a_partys_folder(tmp_path: Path) -> None:
    federation = settled(tmp_path)
    federation.server.close()
    names = {path.name for path in federation.home("a").rglob("*")}
    assert {
        "ledger.jsonl",
        "ledger.jsonl.head",
        "events.jsonl",
        "runs",
        federation.server.run,
        "a.safetensors",
    } <= names
    assert open_to_others(federation.home("a")) == set()


def test_a_servers_memories_and_ledger(tmp_path: Path) -> None:
    federation = settled(tmp_path)
    federation.server.close()
    assert open_to_others(tmp_path / "server" / "checkpoint") == set()
    public = {"server", ".lock", "metrics.jsonl"}
    assert open_to_others(tmp_path / "server") <= public


def test_private_keys(tmp_path: Path) -> None:
    make_server(tmp_path / "server")
    make_key(tmp_path / "keys" / "party")
    assert open_to_others(tmp_path / "server") <= {"ca.crt", "server.crt"}
    assert open_to_others(tmp_path / "keys") <= {"party.pub"}


def test_what_a_partys_process_says(tmp_path: Path) -> None:
    """Its own code may repeat its data there, in an error."""
    with Processes(tmp_path / "federation" / "logs") as processes:
        processes.start("party-0", [sys.executable, "-c", "print('patient 4711')"])
        wait_for(lambda: "4711" in processes.log("party-0").read_text(), "the process to speak")
    assert open_to_others(tmp_path / "federation") == set()
