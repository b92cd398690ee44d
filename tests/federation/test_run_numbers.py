"""Two runs of one name are two runs, and a message is sent again only under the terms that it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from normec import Clip21, NormEC, Privacy
from normec.federation.protocol.account import FILE, read_releases
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Refusal, Reply, to_fields

from .faulty_network import DIMENSION, Quadratic
from .hostile import HostileServer, zeros
from .in_process import plan

POLICY = Policy(epsilon=500.0, least_sigma=1e-3)
LEDGER = (FILE, FILE + ".head")


def open_server(folder: Path) -> Coordinator:
    privacy = Privacy(sigma=2.0, trust="local", memory="noisy")
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    return Coordinator(NormEC(0.1, 0.5), start, ["a"], plan(10), run="my-app", privacy=privacy, folder=folder)


def rounds(server: Coordinator, folder: Path, count: int) -> set[str]:
    """So many rounds with one party; the digests of what left it."""
    left = set()
    for _ in range(count):
        while requests := server.requests():
            answer = Party(folder, POLICY, Quadratic(), node="a").answer(to_fields(requests["a"]))
            if isinstance(answer, Reply):
                left.add(answer.digest)
            server.receive("a", to_fields(answer))
        server.close_round()
    return left


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("removed", [True, False])
def test_a_second_run_of_a_name_is_charged_for_itself(removed: bool, tmp_path: Path) -> None:
    """The party's disk dies in the second run; its ledger comes back from a copy of the first run's end."""
    home = tmp_path / "party"
    one = open_server(tmp_path / "one")
    left = rounds(one, home, 10)
    for name in LEDGER:
        shutil.copy(home / name, tmp_path / name)
    if removed:
        shutil.rmtree(home / "runs" / one.run)
    two = open_server(tmp_path / "two")
    left |= rounds(two, home, 5)
    shutil.rmtree(home)
    home.mkdir()
    for name in LEDGER:
        shutil.copy(tmp_path / name, home / name)
    left |= rounds(two, home, 5)
    releases = read_releases(home)
    assert len(left) == 20
    assert releases.count() >= 20
    assert (releases.count(one.run), releases.count("my-app")) == (10, releases.count())
    for server in (one, two):
        server.close()


def test_a_restarted_server_keeps_the_number_of_its_run(tmp_path: Path) -> None:
    first = open_server(tmp_path / "one")
    first.close()
    again, other = open_server(tmp_path / "one"), open_server(tmp_path / "two")
    assert again.run == first.run != other.run
    assert first.run.startswith("my-app~")
    for server in (again, other):
        server.close()


def test_a_far_round_of_one_server_shuts_no_other_out(tmp_path: Path) -> None:
    party = Party(tmp_path, POLICY, Quadratic(), node="a")
    far = HostileServer(party, zeros(DIMENSION), run="my-app")
    assert isinstance(far.ask(round=2**31 - 2, plan__rounds=2**31), Reply)
    honest = HostileServer(party, zeros(DIMENSION), run="my-app", number="1" * 16)
    assert isinstance(honest.ask(), Reply)


def test_a_record_of_another_chain_leads_to_a_handshake(tmp_path: Path) -> None:
    asking = HostileServer(Party(tmp_path, POLICY, Quadratic(), node="a"), zeros(DIMENSION))
    assert isinstance(asking.ask(round=900), Reply)
    for record in ({"accepted": 0, "digest": "1" * 64}, {"accepted": 1, "digest": "1" * 64, "since": 1}):
        answer = asking.send(asking.fields(round=5, **{f"record__{name}": value for name, value in record.items()}))
        assert isinstance(answer, Refusal)
        assert answer.reason == "state"


def test_a_tightened_policy_is_not_undercut_by_a_message_of_another_bound(tmp_path: Path) -> None:
    loose = Policy(epsilon=1e5, least_sigma=0.01, methods=["clip21"])
    privacy = Privacy(sigma=1.0, noise="secure", memory="noisy", trust="local")
    party = Party(tmp_path, loose, Quadratic(), node="a")
    made = HostileServer(party, zeros(DIMENSION), method=Clip21(100.0), privacy=privacy, sigma=1.0)
    first = made.ask()
    assert isinstance(first, Reply)
    tight = Party(tmp_path, Policy(epsilon=1e5, least_sigma=1.0, methods=["normec"]), Quadratic(), node="a")
    asking = HostileServer(tight, zeros(DIMENSION), privacy=privacy, sigma=1.0, token=made.token)
    second = asking.ask()
    assert isinstance(second, Reply)
    assert not np.array_equal(second.message, first.message)
    assert read_releases(tmp_path).count() == 2


def test_a_model_that_is_too_large_is_a_refusal_and_no_fault(tmp_path: Path) -> None:
    server = open_server(tmp_path / "server")
    party = Party(tmp_path / "a", Policy(epsilon=8.0, largest_model=3), Quadratic(), node="a")
    answer = party.answer(to_fields(server.requests()["a"]))
    assert server.receive("a", to_fields(answer)) == "refused"
    assert server.refusals == {"a": "malformed"}
    assert server.state.parties["a"].faults == 0
    server.close()
