"""A disk that is full or not writable.

The server says so in one line that names the path, and leaves a folder that the run goes on from. A party refuses, and
takes part again once there is room.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from normec import NormEC, Privacy, UsageError
from normec.federation.flower.run_parties import FILE, gather
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.wire import SumRequest

from ..support.waiting import LIMIT
from .faulty_network import NODES, SETTINGS, FaultyFederation
from .summing_hospitals import SummingHospitals


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: the system refuses the write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failure_of(federation: FaultyFederation, size: int) -> str | None:
    """What the server says of a round that it closes with little room; None where the room was enough."""
    try:
        with full(size):
            federation.server.close_round()
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy memory", "central"])
def test_a_disk_that_is_full_at_any_write_of_a_round(name: str, tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, *SETTINGS[name], minimum=len(NODES))
    federation.settle()
    failures = 0
    for size in (0, 1, 100, 200, 400, 800, 1200, 1600, 2400, 3200, 4800, 6400, 9600, 12_800):
        for node in NODES:
            federation.answer(node)
        rounds = federation.server.round
        said = failure_of(federation, size)
        if said is not None:
            failures += 1
            assert said.startswith("cannot write to")
            assert str(tmp_path / "server") in said
            assert "\n" not in said
            assert federation.server.finished
            for call in (federation.server.close_round, federation.server.requests, federation.server.finish):
                with pytest.raises(UsageError, match="cannot write to"):
                    call()
            federation.flying.clear()
            federation.restart()
            assert federation.server.round in (rounds, rounds + 1)
        federation.check()
    assert failures > 5
    assert federation.server.round > 2
    federation.settle()
    federation.server.close()


@pytest.mark.parametrize("stage", ["keys", "vectors", "reveals"])
def test_a_party_of_a_secure_sum_takes_part_again_once_there_is_room(stage: str, tmp_path: Path) -> None:
    """What it had begun is lost, as after a restart; its ledger has a line for each of its vectors."""
    federation = SummingHospitals(tmp_path, NormEC(0.5, 0.4), 3, Privacy(sigma=0.2, trust="secure-sum", delta=1e-4))
    ask, failed = federation.ask, []

    def asked(node: str, request: SumRequest) -> str:
        if node != "a" or failed or federation.server.stage != stage:
            return ask(node, request)
        with full(0):
            failed.append(ask(node, request))
        return failed[0]

    federation.ask = asked  # type: ignore[method-assign]
    federation.run()
    assert failed == ["refused"]
    assert federation.server.round == 3
    assert read_releases(federation.home("a")).count() >= 2
    federation.close()


def test_a_bad_message_on_a_full_disk_is_not_a_traceback(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, *SETTINGS["no noise"])
    with full(0):
        assert federation.server.receive("a", {}) == "dropped"  # a journal that cannot be written stops nothing
    federation.restart()
    federation.settle()
    federation.server.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with full(0), pytest.raises(UsageError, match="cannot write to"):
        FaultyFederation(tmp_path, *SETTINGS["noisy memory"])
    FaultyFederation(
        tmp_path, *SETTINGS["noisy memory"]
    ).server.close()  # the lock was let go, and nothing is in the way


@pytest.mark.parametrize("held", ["", "{}", "[]", json.dumps({"parties": [7]}), json.dumps({"parties": ["../x"]})])
def test_a_damaged_list_of_parties_is_named(held: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(held)
    with pytest.raises(UsageError, match=f"{FILE} is damaged"):
        gather(None, tmp_path, 1, 1.0, print)  # type: ignore[arg-type]


@pytest.mark.slow
def test_flower_logs_a_users_mistake_in_one_line() -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "from normec.federation.flower.app import _one_line\n"
        "from normec.errors import UsageError\n"
        "log = logging.getLogger('flwr')\n"
        "log.addFilter(_one_line)\n"
        "for kind in (UsageError, KeyError):\n"
        "    try:\n"
        "        raise kind('the disk is full')\n"
        "    except Exception as error:\n"
        "        log.error('%s raised an exception', 'ServerApp', exc_info=error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    first, *rest = ended.stdout.splitlines()
    assert first == "ERROR:flwr:error: the disk is full"
    assert "Traceback" in "".join(rest)  # a mistake of the code keeps its traceback
