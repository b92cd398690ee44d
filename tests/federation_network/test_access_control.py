"""Access control of a real SuperLink and SuperNode: what their owner may ask, and what a stranger is told."""

from __future__ import annotations

import stat
from pathlib import Path

import httpx
import pytest

from normec.federation.local.federation import Federation, LocalOptions

from ..support.waiting import wait_for

pytestmark = pytest.mark.slow

CLAIM = {"x-forwarded-for": "10.1.2.3"}  # as if it came from another machine


def test_a_stranger_starts_no_runs_and_registers_no_parties(tmp_path: Path) -> None:
    federation = Federation(LocalOptions(None, tmp_path / "home", 1, {}))
    with federation:
        federation.start_superlink(lambda: None, database=True)  # waits until it answers to its owner
        federation.register()
        assert federation.nodes
        at = f"https://{federation.address}"
        authority = str(tmp_path / "home" / "federation" / "tls" / "ca.crt")
        with httpx.Client(verify=authority, trust_env=False, headers=CLAIM) as stranger:
            for path in ("control/start-run", "control/register-node", "control/list-nodes", "runtime/acquire-task"):
                assert stranger.post(f"{at}/v1/{path}").status_code == 403, path
            assert stranger.get(f"{at}/docs").status_code == 403
            assert stranger.post(f"{at}/v1/fleet/pull-messages").status_code == 401  # no signature
            assert stranger.get(f"{at}/health").status_code == 200
            with pytest.raises(httpx.TransportError):  # headers are read before anybody knows who sends them
                stranger.get(f"{at}/health", headers={"endless": "a" * 2**24})
        database = tmp_path / "home" / "federation" / "superlink.db"  # holds messages that are on their way
        assert not database.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def test_a_stranger_takes_no_tasks_from_a_partys_supernode(tmp_path: Path) -> None:
    """Whoever takes a task there answers for the party, and says which policy it has from then on."""
    federation = Federation(LocalOptions(None, tmp_path / "home", 1, {}, flower_nodes=True))
    with federation:
        federation.start_superlink(lambda: None)
        federation.register()
        federation.start_party(0)
        log = federation.processes.log("party-0")
        started = "Uvicorn running on http://"
        wait_for(lambda: started in log.read_text(), "the SuperNode's port", lambda: federation.check(["party-0"]))
        at = "http://" + log.read_text().partition(started)[2].split()[0]
        with httpx.Client(trust_env=False) as owner, httpx.Client(trust_env=False, headers=CLAIM) as stranger:
            for path in ("acquire-task", "pull-task-input", "push-task-output", "pull-messages"):
                assert stranger.post(f"{at}/v1/runtime/{path}").status_code == 403, path
            assert owner.post(f"{at}/v1/runtime/acquire-task").status_code == 415  # Flower's word: no protobuf
