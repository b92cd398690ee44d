"""Five parties, logistic regression, one SuperLink: what may go wrong over a network, with real processes and TLS."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import normec
from normec.federation.local import certificates
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.server_state import TOKENS
from normec.privacy.accounting import Event

from ..support.waiting import wait_for
from .network import PARTIES, WITHOUT_NOISE, NetworkFederation
from .parts.hostile import KINDS

pytestmark = pytest.mark.slow

ROUNDS = 4


@dataclass(frozen=True)
class TheFirst:
    """Only the first clients ever take part."""

    count: int

    def draw(self, clients: int, round: int, seed: int) -> torch.Tensor:  # noqa: ARG002
        return torch.arange(self.count)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkFederation]:
    with NetworkFederation(tmp_path_factory.mktemp("network"), "logistic") as entered:
        yield entered


def test_same_trajectory_as_in_one_process(network: NetworkFederation) -> None:
    network.play("plain", rounds=ROUNDS, lr=0.3, batch_size=32, seed=5, evaluate_every=1, **WITHOUT_NOISE)
    method = normec.NormEC(alpha=0.01, beta=0.1)
    run = normec.train(
        network.problem(),
        method,
        lr=0.3,
        rounds=ROUNDS,
        batch_size=32,
        seed=5,
        logging=normec.Logging(evaluate_every=1),
    )
    torch.testing.assert_close(network.server("plain")["x"], run.x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network.server("plain")["client.memory"], run.state.memory, rtol=1e-4, atol=1e-6)
    assert [row["test_loss"] for row in network.rows("plain")] == pytest.approx(run.history["test_loss"], rel=1e-4)
    assert network.summary("plain")["status"] == "finished"
    assert (network.out("plain") / "report.html").exists()
    network.check("plain")


def test_parties_killed_in_every_phase_of_a_round_and_a_disk_wiped(network: NetworkFederation) -> None:
    phases = ("received", "paid", "computed", "written", "sent")
    for i, phase in enumerate(phases):
        network.stop_at(i, phase, round=1)
    run = network.begin("killed", rounds=ROUNDS, sigma=0.5, epsilon="", lr=0.05)
    for i in range(PARTIES):  # the last reaches its phase when its call is answered: with the next round
        wait_for(lambda i=i: network.stopped(i), f"party {i} to reach {phases[i]}")
        network.kill(i)
        if i == PARTIES - 1:  # its message is with the server; nobody else knows of it any more
            wiped = network.federation.folder(i)
            shutil.rmtree(wiped)
            network.policy(i)
        network.start(i)
    assert network.end(run) == ""
    network.check("killed")
    assert network.summary("killed")["round"] == ROUNDS
    made = {i: read_releases(network.federation.folder(i)).count("killed") for i in range(PARTIES)}
    assert made[0] == made[3] == ROUNDS  # nothing was paid for twice
    assert made[1] == made[2] == ROUNDS + 1  # killed between paying and writing: paid once too often, never too little
    assert made[4] >= ROUNDS
    assert "recovered" in {line["event"] for line in read_journal(wiped / "events.jsonl")}


def test_a_users_method_with_a_party_killed_and_one_that_lost_its_disk(network: NetworkFederation) -> None:
    """A disk that is lost before its party's first message is accepted loses nothing: the trajectory is the same."""
    settings = {"method": "my_method.py:Clip21SGDM", "method_settings": "tau=0.3,eta=0.4", "alpha": "", "lr": 0.2}
    network.stop_at(0, "written", round=0)
    network.stop_at(1, "computed", round=2)
    run = network.begin("own", rounds=ROUNDS, batch_size=32, seed=5, **settings, **WITHOUT_NOISE)
    for i in (0, 1):
        wait_for(lambda i=i: network.stopped(i), f"party {i} to be stopped")
        network.kill(i)
        if i == 0:
            shutil.rmtree(network.federation.folder(0))
            network.policy(0)
        network.start(i)
    assert network.end(run) == ""
    network.check("own")
    method = network.method(network.config, len(network.server("own")["x"]))
    assert method.spec() == {"tau": 0.3, "eta": 0.4}
    run_here = normec.train(network.problem(), method, lr=0.2, rounds=ROUNDS, batch_size=32, seed=5)
    torch.testing.assert_close(network.server("own")["x"], run_here.x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network.server("own")["client.memory"], run_here.state.memory, rtol=1e-4, atol=1e-6)

    other = network.federation.folder(3) / "my_method.py"  # a party with code of its own refuses, and says so at home
    other.write_text(other.read_text().replace("1 - self.eta", "2 - self.eta"))
    network.kill(3)
    network.start(3)
    assert network.end(network.begin("code", rounds=1, **settings, **WITHOUT_NOISE)) == ""
    assert "terms: 1" in network.summary("code")["stopped"]
    assert "differs from the server's" in read_journal(other.with_name("events.jsonl"))[-1]["exact"]
    network.policy(3)
    network.kill(3)
    network.start(3)


def test_a_budget_that_runs_out_in_the_middle_under_central_trust(network: NetworkFederation) -> None:
    settings = {"rounds": 6, "sigma": 0.5, "epsilon": "", "lr": 0.05, "min_parties": PARTIES - 1, "trust": "central"}
    faced = 0.5 * PARTIES**0.5  # the server's one draw on the sum is that of five parties
    for i, messages in ((0, 1), (1, 2)):
        spent = read_releases(network.federation.folder(i)).account("client", 1e-5)
        spent.add(Event(faced, 1.0, messages))
        most = spent.epsilon()
        spent.add(Event(faced, 1.0, 1))
        network.policy(i, epsilon=(most + spent.epsilon()) / 2)
    assert network.end(network.begin("budget", **settings)) == ""
    summary = network.summary("budget")
    assert summary["status"] == "stopped"
    assert summary["round"] == 2
    assert "budget: 2" in summary["stopped"]
    paid = [read_releases(network.federation.folder(i)).count("budget") for i in range(PARTIES)]
    assert paid[:2] == [1, 2]
    assert all(count in (2, 3) for count in paid[2:])  # a message of the round that never closed, if it was made
    network.check("budget")
    for i in (0, 1):
        network.policy(i)


def test_a_node_that_was_not_registered_is_refused(network: NetworkFederation) -> None:
    federation, stranger = network.federation, network.folder / "stranger"
    certificates.make_key(stranger)
    policy = federation.folder(0) / "policy.toml"
    command = [sys.executable, "-m", "normec", "federation", "party", "--superlink", federation.address]
    command += ["--root-certificates", str(federation.home / "tls" / "ca.crt"), "--key", str(stranger)]
    command += ["--app", str(federation.app), "--folder", str(network.folder / "nowhere"), "--policy", str(policy)]
    command += ["--patience", "0"]
    federation.processes.start("stranger", command)
    wait_for(lambda: federation.processes.ended("stranger") is not None, "the stranger to be refused")
    assert federation.processes.ended("stranger") == 3  # not admitted
    assert "its key is not registered" in federation.processes.log("stranger").read_text()


def test_malformed_messages_of_every_kind_change_nothing_and_hold_nobody_up(network: NetworkFederation) -> None:
    """A round's limit is an hour: were one of the hostile parties waited for, the test would not end."""
    federation, rounds = network.federation, 3
    keys = [network.folder / "hostile" / str(i) for i in range(len(KINDS))]
    with federation.control() as control:
        for key in keys:
            control.register(certificates.make_key(key))
    command = [sys.executable, "-m", "tests.federation_network.parts.hostile", federation.address]
    command += [str(federation.home / "tls" / "ca.crt"), *map(str, keys)]
    federation.processes.start("hostile", command, {"PYTHONPATH": os.pathsep.join(sys.path)})
    everyone, training = PARTIES + len(KINDS), {"rounds": rounds, "lr": 0.3, "batch_size": 32, "seed": 5}
    network.play("hostile", parties=everyone, min_parties=PARTIES, round_seconds=3600.0, **training, **WITHOUT_NOISE)
    federation.processes.kill("hostile")

    network.check("hostile")
    facts, kept = network.facts("hostile"), network.server("hostile")
    names = facts["identity"]["parties"]
    assert [facts["seats"][name]["accepted"] for name in names] == [rounds] * PARTIES + [0] * len(KINDS)
    assert not kept["client.memory"][PARTIES:].any()
    journal = read_journal(network.out("hostile") / "events.jsonl")
    dropped = {line["party"]: line["why"] for line in journal if line["event"] == "dropped"}
    who = dict(zip(KINDS, names[PARTIES:], strict=True))
    assert dropped.keys() == {name for kind, name in who.items() if kind != "handshake after handshake"}
    assert all(dropped.values())
    assert "print" not in json.dumps(dropped)  # nothing of what was sent is repeated
    for kind in ("a large array", "three hundred arrays", "many fields"):  # refused by size or count, before reading
        assert "that a message may have" in dropped[who[kind]] or "the most that is allowed" in dropped[who[kind]]
    assert {line["party"] for line in journal if line["event"] == "suspended"} == set(who.values())
    assert len(facts["seats"][who["handshake after handshake"]]["tokens"]) <= TOKENS

    # And x is what it would have been had the hostile kept silent.
    method = normec.NormEC(alpha=0.01, beta=0.1)
    settings = {**training, "participation": TheFirst(PARTIES)}
    run = normec.train(network.problem(silent=len(KINDS)), method, **settings)
    torch.testing.assert_close(kept["x"], run.x, rtol=1e-4, atol=1e-5)
