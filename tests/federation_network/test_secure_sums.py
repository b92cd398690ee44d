"""Secure sums of five parties over TLS: the same model as in one process, kills of parties and server, and rosters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import normec
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.journal import read_journal
from normec.federation.secure_sum.roster import Roster
from normec.privacy.hash_chain import read_chain

from ..support.waiting import LIMIT, wait_for
from .local_command import forked, running
from .network import PARTIES, WITHOUT_NOISE, NetworkFederation

pytestmark = pytest.mark.slow

MASKED = {"method": "clip21", "alpha": "", "tau": 0.5, "lr": 0.2, "seed": 1, "secure_sum": True, **WITHOUT_NOISE}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkFederation]:
    with NetworkFederation(tmp_path_factory.mktemp("sums"), "logistic") as opened:
        opened.federation.write_roster()
        for i in range(PARTIES):
            opened.policy(i, trusts=["secure-sum"])
        yield opened


def x_of(network: NetworkFederation, name: str) -> torch.Tensor:
    return network.server(name)["x"]


def simulated(network: NetworkFederation, rounds: int) -> torch.Tensor:
    return normec.train(network.problem(), normec.Clip21(tau=0.5), lr=0.2, rounds=rounds, seed=1).x


def test_masked_sums_train_the_same_model(network: NetworkFederation) -> None:
    network.play("masked", rounds=4, **MASKED)
    torch.testing.assert_close(x_of(network, "masked"), simulated(network, 4), rtol=1e-4, atol=1e-6)
    assert "client.memory" not in network.server("masked")  # the server has seen no party's messages


def test_epsilon_is_that_of_a_simulation(network: NetworkFederation) -> None:
    rounds = 3
    network.play("private", rounds=rounds, epsilon=4.0, trust="secure-sum", lr=0.1, min_parties=4, colluding=1)
    spent = network.summary("private")["privacy"]
    privacy = normec.Privacy(epsilon=4.0, delta=1e-5, trust="secure-sum", honest=3)
    run = normec.train(
        network.problem(), normec.NormEC(alpha=0.01, beta=0.1), lr=0.1, rounds=rounds, privacy=privacy
    ).privacy
    assert run is not None
    assert (spent["epsilon"], spent["sigma"]) == (run.epsilon, run.sigma)
    assert not spent["simulation"]
    for i in range(PARTIES):
        assert read_releases(network.federation.folder(i)).epsilon("client", 1e-5, "private") == pytest.approx(
            spent["epsilon"], rel=1e-9
        )


def test_a_killed_party_is_missed_and_comes_back(network: NetworkFederation) -> None:
    def summed() -> list[float]:
        return [row["parties"] for row in network.rows("killed") if "parties" in row]

    run = network.begin("killed", rounds=100_000, round_seconds=5.0, **MASKED)
    wait_for(lambda: summed()[-1:] == [5], "the first sum")
    network.kill(4)
    wait_for(lambda: summed()[-1] == 4, "a sum without the party that was killed")
    network.start(4)
    wait_for(lambda: summed()[-1] == 5, "a sum with the party that came back")
    with network.federation.control() as control:
        control.stop(run)
    journal = read_journal(network.out("killed") / "events.jsonl")
    assert {line["event"] for line in journal} >= {"away", "suspended"}


def test_a_killed_server_applies_every_sum_once(network: NetworkFederation) -> None:
    rounds = 12
    network.begin("server", rounds=rounds, **MASKED)
    for wanted in (1, 5):
        wait_for(lambda: len(network.rows("server")) > wanted, f"round {wanted}")  # noqa: B023
        assert network.kill_server()
        run = network.begin("server", rounds=rounds, **MASKED)
    assert network.end(run) == ""
    torch.testing.assert_close(x_of(network, "server"), simulated(network, rounds), rtol=1e-3, atol=1e-5)
    chain = read_chain(network.out("server") / "secure-sum" / "secure-sum.jsonl").lines
    assert sum(line["event"] == "certified" for line in chain) == rounds


def test_parties_with_different_rosters_are_named(network: NetworkFederation) -> None:
    path = network.federation.folder(3) / "roster.toml"
    pinned = Roster.load(path)
    network.kill(3)  # a party reads its roster when it starts
    Roster(pinned.members[::-1]).save(path)
    network.start(3)
    outcome = network.end(network.begin("rosters", rounds=2, **MASKED))
    assert "has another roster than" in outcome
    network.kill(3)
    pinned.save(path)
    network.start(3)


def test_four_hospitals_are_the_example(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = forked(out, data=None)
    printed, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(printed)
    assert (found["unit"], found["trust"], found["rounds"], found["delta"]) == ("record", "secure-sum", 30, 1e-4)
    assert 0.99 < found["epsilon"] <= 1
    assert found["accuracy_mean_over_parties"] > 0.78  # 83 % in simulations, with a standard deviation of 1.2
    assert found["seconds_per_round"] > 0
    assert not running(out)
    statements = json.loads((out / "statements.json").read_text())["parties"]
    assert [one["releases"] for one in statements] == [30] * 4
    page = (out / "report.html").read_text()
    assert all(f"<h3>{one['name']}</h3>" in page for one in statements)
