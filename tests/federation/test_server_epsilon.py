"""The ε that the server reports is never below that of what its parties have released, under local trust."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from normec import NormEC, Privacy
from normec.errors import UsageError
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.wire import Refusal, Reply, to_fields
from normec.privacy.accounting import Account, Event
from normec.privacy.ledger_verification import verified
from normec.report import guarantee
from normec.report.html import Html
from normec.report.run_view import read_run

from .faulty_network import DIMENSION, Quadratic
from .in_process import plan

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


def answered(server: Coordinator, folder: Path, node: str) -> None:
    """Ask a party until its message has reached the server."""
    while not isinstance(exchange(server, folder, node), Reply):
        pass


def lose_disks(server: Coordinator, folder: Path, times: int) -> set[str]:
    """Let `a` make a message and lose its disk and the message, so many times, and then make one that arrives.

    Returns the digests of all its messages, which an observer of the network has seen.
    """
    seen = set()
    for lost in (*[True] * times, False):
        answer: Reply | Refusal = Refusal("r", "a", 0, "state")
        while isinstance(answer, Refusal):
            answer = party(folder, "a").answer(server.requests()["a"])
            if isinstance(answer, Refusal) or not lost:
                server.receive("a", to_fields(answer))
        seen.add(answer.digest)
        if lost:
            shutil.rmtree(folder / "a")
    return seen


def test_a_run_that_stops_before_its_first_round_closes_has_released_messages(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    assert isinstance(exchange(server, tmp_path, "a"), Refusal)  # its handshake
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
    server = open_server(tmp_path)
    seen = set()
    while not server.finished:
        seen |= lose_disks(server, tmp_path, times=2)
        answered(server, tmp_path, "b")
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
    assert "(epsilon, delta) = (2," not in spent.statement
    assert f"(epsilon, delta) = ({math.ceil(truth * 1000) / 1000:g}, 1e-05)" in spent.statement
    assert not spent.is_target
    assert run.history["epsilon"][-1] == pytest.approx(truth, rel=1e-6)
    server.close()
    again = open_server(tmp_path)  # what is stated does not change with a restart
    assert again.finish().privacy == spent
    again.close()


def test_a_run_in_which_nothing_was_lost_ends_at_its_target(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    while not server.finished:
        for node in NODES:
            answered(server, tmp_path, node)
        server.close_round()
    spent = server.finish().privacy
    assert spent is not None
    assert spent.releases == 3
    assert spent.epsilon <= 2
    assert spent.is_target
    assert "(epsilon, delta) = (2, 1e-05)" in spent.statement
    assert not any("may have released" in note for note in spent.notes)
    server.close()


def test_a_killed_server_leaves_the_epsilon_of_all_that_its_parties_released(tmp_path: Path) -> None:
    """No summary was written, and the server's ledger knows of one release where `a` made seven."""
    server = open_server(tmp_path)
    lose_disks(server, tmp_path, times=6)
    assert server.mechanism is not None
    truth = server.mechanism.release.epsilon(server.mechanism.sigma, 1e-5, 7)
    server.close()
    left = verified(tmp_path / "server")
    assert left is not None
    assert left.releases == 7
    assert left.epsilon == pytest.approx(truth, rel=1e-9)


def test_a_summary_from_before_disks_were_lost_does_not_lower_epsilon(tmp_path: Path) -> None:
    """The run was stopped, stated its epsilon, went on with the same round, and was killed after `a` lost its disk."""
    server = open_server(tmp_path)
    lose_disks(server, tmp_path, times=0)
    server.stop("for the night")
    stated = server.finish().privacy
    server.close()
    assert stated is not None
    old = {"status": "stopped", "privacy": stated.to_dict()}
    before = verified(tmp_path / "server", old)
    server = open_server(tmp_path)
    shutil.rmtree(tmp_path / "a")
    lose_disks(server, tmp_path, times=3)
    truth = server.finish().privacy
    server.close()
    assert truth is not None
    after = verified(tmp_path / "server", old)
    assert before is not None
    assert after is not None
    assert (before.releases, after.releases) == (1, truth.releases)
    assert after.epsilon == pytest.approx(truth.epsilon, rel=1e-9)


def test_a_finished_summary_that_leaves_out_lost_messages_is_refused(tmp_path: Path) -> None:
    server = open_server(tmp_path, rounds=1)
    lose_disks(server, tmp_path, times=2)
    answered(server, tmp_path, "b")
    server.close_round()
    spent = server.finish().privacy
    server.close()
    assert spent is not None
    whole = {"status": "finished", "privacy": spent.to_dict()}
    stated = verified(tmp_path / "server", whole)
    assert stated is not None
    assert stated.releases == spent.releases == 3
    assert server.mechanism is not None
    fewer = server.mechanism.release.epsilon(server.mechanism.sigma, 1e-5, 1)
    edited = {"status": "finished", "privacy": {**spent.to_dict(), "epsilon": fewer, "releases": 1, "beyond_ledger": 0}}
    with pytest.raises(UsageError, match=r"in 3 releases, summary\.json says .* in 1;"):
        verified(tmp_path / "server", edited)


def test_a_page_says_in_words_what_all_messages_tell_an_observer(tmp_path: Path) -> None:
    """The ledger alone has one release; `a` has made seven, which pass the target."""
    server = open_server(tmp_path)
    lose_disks(server, tmp_path, times=6)
    answered(server, tmp_path, "b")
    server.close_round()
    assert server.mechanism is not None
    mu = math.sqrt(7) / server.mechanism.sigma  # the bound of NormEC's message is 1
    server.close()
    normal = NormalDist()
    known = normal.cdf(normal.inv_cdf(0.01) + mu)
    view = read_run(tmp_path / "server")
    page = " ".join(str(section) for section in guarantee.sections(view, Html("")))
    assert f"at most {math.ceil(known * 1000) / 10:g} % of those that did" in page
    assert "above the budget of ε = 2" in page
    assert "without the 6 messages more that a party may have released" in page


def test_a_page_says_nothing_in_words_of_a_ledger_that_was_set_back(tmp_path: Path) -> None:
    server, folder = open_server(tmp_path), tmp_path / "server"
    for k in range(2):
        for node in NODES:
            answered(server, tmp_path, node)
        server.close_round()
        if k == 0:
            old = {name: (folder / name).read_bytes() for name in ("ledger.jsonl", "ledger.jsonl.head")}
    server.close()
    assert "In plain words" in str(guarantee.sections(read_run(folder), Html("")))
    for name, contents in old.items():
        (folder / name).write_bytes(contents)
    view = read_run(folder)
    assert view.epsilon is None
    assert "In plain words" not in str(guarantee.sections(view, Html("")))
