"""The ε that the server reports is never below that of what its parties have released, under local trust."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import NormEC, Privacy
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.wire import Refusal, Reply, to_fields
from normec.privacy.accounting import Account, Event

from .stories import DIMENSION, Quadratic
from .village import plan

POLICY = Policy(epsilon=50.0, least_sigma=1e-3)
TARGET = Privacy(epsilon=2, delta=1e-5, trust="local", memory="noisy")
NODES = ["a", "b"]


def open_server(folder: Path, rounds: int = 3, **changes: Any) -> Coordinator:
    given: dict[str, Any] = {"privacy": TARGET, "minimum": 2, **changes}
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    return Coordinator(NormEC(0.1, 0.5), start, NODES, plan(rounds), run="r", folder=folder / "server", **given)


def party(folder: Path, node: str) -> Party:
    return Party(folder / node, POLICY, Quadratic(), node=node)


def exchange(server: Coordinator, folder: Path, node: str) -> Reply | Refusal:
    """One request to one party; its answer reaches the server."""
    answer = party(folder, node).answer(server.requests()[node])
    server.receive(node, to_fields(answer))
    return answer


def test_a_run_that_stops_before_its_first_round_closes_has_released_messages(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    assert isinstance(exchange(server, tmp_path, "a"), Refusal)  # its hello
    assert isinstance(exchange(server, tmp_path, "a"), Reply)
    server.stop("b refuses")
    spent = server.finish().privacy
    assert spent is not None
    assert spent.releases == 1
    assert spent.epsilon >= spending(tmp_path / "a", POLICY)["epsilon"] * (1 - 1e-9) > 0
    server.close()


def test_nothing_is_asked_before_the_round_is_in_the_servers_ledger(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    lines = tmp_path / "server" / "ledger.jsonl"
    for _ in range(3):  # asked again, in this process and the next: one release all the same
        server.requests()
        server.requests()
        assert lines.read_text(encoding="utf-8").count('"release"') == 1
        server.close()
        server = open_server(tmp_path)
    server.close()


def test_a_party_that_lost_its_disk_counts_with_all_that_it_released(tmp_path: Path) -> None:
    """Each reply of `a` but the last of a round is seen on the network, and its disk and the reply are lost."""
    server = open_server(tmp_path)
    seen = set()
    while not server.finished:
        for lost in (True, True, False):
            answer: Reply | Refusal = Refusal("r", "a", 0, "state")
            while isinstance(answer, Refusal):
                answer = party(tmp_path, "a").answer(server.requests()["a"])
                if isinstance(answer, Refusal):
                    server.receive("a", to_fields(answer))
            seen.add(answer.digest)
            if lost:
                shutil.rmtree(tmp_path / "a")
            else:
                server.receive("a", to_fields(answer))
        while not isinstance(exchange(server, tmp_path, "b"), Reply):
            pass
        server.close_round()
    run = server.finish()
    spent = run.privacy
    assert spent is not None
    assert server.mechanism is not None
    multiplier = server.mechanism.sigma  # the bound of NormEC's message is 1
    truth = Account(1e-5, [Event(multiplier, 1.0, len(seen))]).epsilon()
    assert len(seen) == 9
    assert spent.releases == 9
    assert spent.epsilon == pytest.approx(truth, rel=1e-6)
    assert spent.epsilon > 2
    assert "a may have released 9 messages in 3 rounds" in spent.notes[-1]
    assert "above the target of 2" in spent.notes[-1]
    assert run.history["epsilon"][-1] == pytest.approx(truth, rel=1e-6)
    server.close()
    again = open_server(tmp_path)  # what is told does not change with a restart
    assert again.finish().privacy == spent
    again.close()


def test_a_run_in_which_nothing_was_lost_ends_at_its_target(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    while not server.finished:
        for node in NODES:
            while not isinstance(exchange(server, tmp_path, node), Reply):
                pass
        server.close_round()
    spent = server.finish().privacy
    assert spent is not None
    assert spent.releases == 3
    assert spent.epsilon <= 2
    assert not any("may have released" in note for note in spent.notes)
    server.close()
