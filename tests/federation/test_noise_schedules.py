"""A federation whose noise changes by round: a party pays for the noise of its round, and no ε is too small."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normec import NormEC, Privacy
from normec.errors import WireError
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.wire import Refusal, Reply, Request, from_fields, to_fields
from normec.privacy.accounting import Account, Event
from normec.privacy.ledger_verification import verified

from .faulty_network import DIMENSION, Quadratic
from .in_process import plan

POLICY = Policy(epsilon=200.0, least_sigma=1e-3, trusts=["local", "central"])
NODES = ["a", "b"]
ROUNDS = 4
FALLING = Privacy(epsilon=2, trust="local", noise_schedule=[8.0, 4.0, 2.0, 1.0])


def open_server(folder: Path, privacy: Privacy = FALLING, minimum: int = 2) -> Coordinator:
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    method = NormEC(0.1, 0.5, server_norm=False)
    return Coordinator(
        method, start, NODES, plan(ROUNDS), run="r", folder=folder / "server", privacy=privacy, minimum=minimum
    )


def party(folder: Path, node: str, policy: Policy = POLICY) -> Party:
    return Party(folder / node, policy, Quadratic(), node=node)


def message(server: Coordinator, folder: Path, node: str) -> Reply:
    """The party's message for this round, handshake included; it does not reach the server."""
    while True:
        answer = party(folder, node).answer(server.requests()[node])
        if isinstance(answer, Reply):
            return answer
        assert answer.reason == "state"
        server.receive(node, to_fields(answer))


def sigmas(server: Coordinator) -> list[float]:
    assert server.mechanism is not None
    return [server.mechanism.sigma_at(k) for k in range(ROUNDS)]


def paid(folder: Path, node: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / node / "ledger.jsonl").read_text().splitlines()]
    return [line["sigma"] for line in lines if line["kind"] == "release" for _ in range(line["count"])]


@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize("schedule", ["best", [8.0, 4.0, 2.0, 1.0]])
def test_server_and_parties_pay_for_the_noise_of_each_round(tmp_path: Path, trust: Any, schedule: Any) -> None:
    server = open_server(tmp_path, Privacy(epsilon=2, trust=trust, noise_schedule=schedule))
    expected = np.array([8.0, 4.0, 2.0, 1.0]) if schedule != "best" else 1 / np.sqrt(np.arange(ROUNDS, 0, -1))
    np.testing.assert_allclose(np.array(sigmas(server)) / sigmas(server)[0], expected / expected[0], rtol=1e-12)
    while not server.finished:
        for node in NODES:
            server.receive(node, to_fields(message(server, tmp_path, node)))
        server.close_round()
    spent = server.finish().privacy
    assert spent is not None
    assert (spent.releases, spent.epsilon) == (ROUNDS, pytest.approx(2, rel=1e-6))
    for node in NODES:
        assert paid(tmp_path, node) == sigmas(server)
        assert spending(tmp_path / node, POLICY)["epsilon"] == pytest.approx(2, rel=1e-6)
    found = verified(tmp_path / "server", {"privacy": spent.to_dict(), "status": "finished"})
    assert found is not None
    server.close()


def test_a_late_message_is_sent_again_without_another_payment(tmp_path: Path) -> None:
    server = open_server(tmp_path, minimum=1)
    late = message(server, tmp_path, "a")
    server.receive("b", to_fields(message(server, tmp_path, "b")))
    server.close_round()
    again = message(server, tmp_path, "a")
    assert again.digest == late.digest
    assert paid(tmp_path, "a") == sigmas(server)[:1]
    server.close()


def test_a_central_message_for_other_noise_is_made_anew(tmp_path: Path) -> None:
    """The server adds the noise of the round in which it adds up; a message that was paid for less is not sent."""
    server = open_server(tmp_path, dataclasses.replace(FALLING, trust="central"), minimum=1)
    message(server, tmp_path, "a")
    server.receive("b", to_fields(message(server, tmp_path, "b")))
    server.close_round()
    message(server, tmp_path, "a")
    assert paid(tmp_path, "a") == sigmas(server)[:2]
    server.close()


@pytest.mark.parametrize("absent", [0, 3])
def test_lost_messages_count_at_the_smallest_noise(tmp_path: Path, absent: int) -> None:
    """`a` takes part from round `absent` on, and in its last round its disk is lost twice, with a message each time.

    Three messages of the last round are dearer than one message in each of the four rounds.
    """
    server = open_server(tmp_path, minimum=1)
    made: list[float] = []
    while not server.finished:
        if server.round >= absent:
            for _ in range(2 if server.round == ROUNDS - 1 else 0):
                message(server, tmp_path, "a")
                made.append(sigmas(server)[server.round])
                shutil.rmtree(tmp_path / "a")
            server.receive("a", to_fields(message(server, tmp_path, "a")))
            made.append(sigmas(server)[server.round])
        server.receive("b", to_fields(message(server, tmp_path, "b")))
        server.close_round()
    run = server.finish()
    spent = run.privacy
    assert spent is not None
    truth = Account(1e-5, [Event(sigma) for sigma in made]).epsilon()
    rounds = Account(1e-5, [*map(Event, sigmas(server)), Event(min(sigmas(server)), count=2)]).epsilon()
    assert spent.epsilon == pytest.approx(rounds, rel=1e-9)
    assert spent.epsilon >= truth * (1 - 1e-9) > 2
    assert not spent.is_target
    assert run.history["epsilon"][-1] == pytest.approx(spent.epsilon, rel=1e-9)
    assert spending(tmp_path / "a", POLICY)["epsilon"] >= truth * (1 - 1e-9)
    found = verified(tmp_path / "server", {"privacy": spent.to_dict(), "status": "finished"})
    assert found is not None
    assert found.epsilon == pytest.approx(spent.epsilon, rel=1e-12)
    left = verified(tmp_path / "server")
    assert left is not None
    assert left[:2] == pytest.approx((spent.epsilon, spent.releases))
    server.close()


def test_a_policy_judges_the_smallest_noise_from_the_first_round_on(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    first, last = sigmas(server)[0], sigmas(server)[-1]
    request = server.requests()["a"]
    assert (request.privacy.sigma, request.privacy.least_sigma) == (first, last)
    strict = POLICY.model_copy(update={"least_sigma": math.sqrt(first * last)})
    answer = party(tmp_path, "a", strict).answer(request)
    assert isinstance(answer, Refusal)
    assert answer.reason == "noise"
    server.close()


def test_a_smallest_noise_above_that_of_the_round_is_malformed(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    request: Request = server.requests()["a"]
    lying = dataclasses.replace(request.privacy, least_sigma=2 * request.privacy.sigma)
    with pytest.raises(WireError, match="least_sigma"):
        from_fields(to_fields(dataclasses.replace(request, privacy=lying)))
    server.close()


def test_a_restarted_server_goes_on_with_the_noise_of_its_round(tmp_path: Path) -> None:
    server = open_server(tmp_path)
    for node in NODES:
        server.receive(node, to_fields(message(server, tmp_path, node)))
    server.close_round()
    server.close()
    server = open_server(tmp_path)
    assert server.round == 1
    assert server.requests()["a"].privacy.sigma == sigmas(server)[1]
    server.close()
