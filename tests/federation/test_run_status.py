"""The status of a run from the server's files, against what the parties themselves have spent."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import NormEC, Privacy, UsageError
from normec.cli.app import run
from normec.federation.flower.run_parties import name_of
from normec.federation.flower.superlink_database import party_activity
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.run_status import run_status
from normec.federation.protocol.spending import spending
from normec.federation.protocol.wire import to_fields

from .faulty_network import DIMENSION, Quadratic
from .in_process import plan

POLICY = Policy(epsilon=50.0, least_sigma=1e-3, allow_without_noise=True)
NODES = ["a", "b", "c"]


def open_server(folder: Path, privacy: Privacy | None, **changes: Any) -> Coordinator:
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    return Coordinator(
        NormEC(0.1, 0.5),
        start,
        NODES,
        plan(6, **changes),
        run="r",
        folder=folder / "server",
        privacy=privacy,
        minimum=1,
    )


def exchange(server: Coordinator, folder: Path, *nodes: str) -> None:
    """These parties answer, handshakes included; then the round closes."""
    for node in nodes:
        for _ in range(2):
            requests = server.requests()
            if node in requests:
                answer = Party(folder / node, POLICY, Quadratic(), node=node).answer(requests[node])
                server.receive(node, to_fields(answer))
    server.close_round()


LOCAL = Privacy(epsilon=4, delta=1e-5, trust="local", memory="noisy")


def test_each_party_by_what_the_server_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = open_server(tmp_path, LOCAL)
    exchange(server, tmp_path, "a", "b")
    exchange(server, tmp_path, "a")
    exchange(server, tmp_path, "a")
    found = run_status(tmp_path / "server")
    assert (found.name, found.round, found.status) == ("r", 3, "running or stopped")
    assert [(one.name, one.accepted, one.behind) for one in found.parties] == [("a", 3, 0), ("b", 1, 2), ("c", 0, 3)]
    for one in found.parties[:2]:
        own = spending(tmp_path / one.name, POLICY)["epsilon"]
        assert one.epsilon is not None
        # A message may be under way, which the server has to count: never less than the party has spent.
        assert one.epsilon >= own * (1 - 1e-9)
    assert found.epsilon is not None
    assert found.epsilon == max(one.epsilon for one in found.parties if one.epsilon is not None)
    assert run(["federation", "status", str(tmp_path / "server"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [party["accepted"] for party in table["parties"]] == [3, 1, 0]
    assert run(["federation", "status", str(tmp_path / "server")]) == 0
    assert "round 3" in capsys.readouterr().out
    server.close()


def test_a_run_that_waits_for_its_parties_has_no_folder_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["federation", "status", str(tmp_path / "run"), "--database", str(tmp_path / "superlink.db")]) == 2
    assert "run; the server creates it when all parties of the run are online" in capsys.readouterr().err


def test_runs_without_privacy_and_folders_without_runs(tmp_path: Path) -> None:
    server = open_server(tmp_path, None, diagnostics=True)
    exchange(server, tmp_path, "a")
    found = run_status(tmp_path / "server")
    assert found.epsilon is None
    assert [one.epsilon for one in found.parties] == [None, None, None]
    server.close()
    with pytest.raises(UsageError, match="holds no federated run"):
        run_status(tmp_path)
    latest = tmp_path / "server" / "checkpoint" / "latest.json"
    latest.write_text(latest.read_text().replace('"round": 1', '"round": 2'))
    with pytest.raises(UsageError, match="is damaged"):
        run_status(tmp_path / "server")


def test_a_ledger_that_was_cut_shows_no_epsilon(tmp_path: Path) -> None:
    server = open_server(tmp_path, LOCAL)
    exchange(server, tmp_path, "a")
    server.close()
    ledger = tmp_path / "server" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match="was cut or rewritten"):
        run_status(tmp_path / "server")


def test_who_is_online_from_the_database_of_a_superlink(tmp_path: Path) -> None:
    """The table as Flower declares it."""
    models = pytest.importorskip("flwr.supercore.state.schema.linkstate_models")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    path = tmp_path / "superlink.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    models.LinkStateBase.metadata.create_all(engine)
    engine.dispose()
    rows = [(1, b"a", "online", 1060.0), (2, b"b", "online", 990.0), (3, b"c", "offline", 700.0), (4, b"d", "x", None)]
    with closing(sqlite3.connect(path)) as held:
        held.executemany(
            "INSERT INTO node (node_id, public_key, status, online_until, heartbeat_interval) VALUES (?, ?, ?, ?, 30)",
            rows,
        )
        held.commit()
    found = party_activity(path, lambda: 1000.0)
    seen = {key: found[name_of(key)] for key in (b"a", b"b", b"c", b"d")}
    assert [one.online for one in seen.values()] == [True, False, False, False]
    assert [one.last_seen for one in seen.values()] == [1000.0, 930.0, 700.0, None]
    with pytest.raises(UsageError, match="there is no database"):
        party_activity(tmp_path / "none.db")
    path.write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(UsageError, match="is not the database of a SuperLink"):
        party_activity(path)
