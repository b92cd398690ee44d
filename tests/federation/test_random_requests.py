"""A server that changes everything between two requests, at random: no record moves a message by more than is charged.

Two parties whose data differ in one record get the same requests. What they would send is noted before the noise, and
both send the same numbers in its place. So both have shown the server the same, as the account assumes, and the
difference of the noted messages is compared with what the line in the ledger covers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Clip21, ErrorFeedback, Method, NormEC, Privacy, Problem, SmoothedNorm
from normec.algorithms import registry
from normec.algorithms.client_momentum import Clip21SGD2M, MomentumNormEC
from normec.federation.protocol import party as protocol
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Reply

from .hostile import HostileServer, zeros

OWN = f"{Path(__file__).with_name('methods') / 'my_method.py'}:LocalAverage"
METHODS = ["normec", "dpsgd", "clip21", "normec-momentum", "clip21-sgd2m", "error-feedback", OWN]
POLICY = Policy(epsilon=1e9, unit="record", units=["client", "record"], least_sigma=1e-6, methods=METHODS)
REQUESTS = 12
NOTHING: dict[str, Any] = {"round": 0, "record.accepted": 0, "record.since": 0, "record.digest": ""}


def oracle(records: int) -> ProblemOracle:
    inputs = torch.from_numpy(np.random.default_rng(3).normal(size=(7, 3)))
    inputs[6] = torch.tensor([-9.0, 3.0, 0.0])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    given = TensorDataset(inputs[:records], torch.ones(records, dtype=torch.float64))
    return ProblemOracle(Problem(model, nn.functional.mse_loss, [given]))


def some_method(draw: random.Random) -> Method:
    return draw.choice(
        [
            NormEC(draw.choice([0.01, 0.5, 5.0]), draw.choice([0.01, 0.3]), decay=draw.choice([0.0, 0.2])),
            DPSGD(draw.choice([Clip(0.5), SmoothedNorm(0.3)])),
            Clip21(draw.choice([0.1, 3.0])),
            registry.build(OWN, {"tau": 0.5}),
            MomentumNormEC(0.5, 0.3),
            Clip21SGD2M(0.5),
            ErrorFeedback(Clip(0.7), beta=0.4),
        ]
    )


def some_terms(
    draw: random.Random, unit: str, accepted: dict[str, Any], numbers: np.random.Generator
) -> dict[str, Any]:
    """Fields of a request: the round, perhaps a clip per record, and perhaps a memory that the server made up."""
    found = {**accepted, "round": accepted["round"] + draw.choice([0, 0, 1, 3])}
    if unit == "record" and draw.random() < 0.8:
        found |= {
            "plan.records.divisor": draw.choice([1.0, 8.0, 50.0]),
            "plan.records.by_layer": draw.choice([True, False]),
            "plan.records.clip": draw.choice([0.01, 1.0, 30.0]),
        }
    if accepted["record.accepted"] and draw.random() < 0.15:
        found["record.row"] = numbers.normal(size=4) * 10 ** draw.uniform(-2, 6)
    return found


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("seed", [25, 1, 2, 3])  # at 25 a method of the party's own leaves its state to a memory
def test_no_sequence_of_requests_moves_a_message_further_than_is_charged(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Tensor] = []
    sent: list[Tensor] = []

    def shown(message: Tensor, *_: Any, **__: Any) -> Tensor:
        noted.append(message.double())
        return sent[0].to(message.dtype)

    monkeypatch.setattr(protocol, "privatise", shown)
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    servers = [
        HostileServer(Party(tmp_path / str(records), POLICY, oracle(records), node="a"), zeros(4)) for records in (7, 6)
    ]
    accepted, compared, method = NOTHING, 0, some_method(draw)
    for _ in range(REQUESTS):
        method = some_method(draw) if draw.random() < 0.5 else method
        unit, memory = draw.choice(["record", "record", "client"]), draw.choice(["noisy", "noisy", "clean"])
        terms, x = some_terms(draw, unit, accepted, numbers), numbers.normal(size=4) * 10 ** draw.uniform(-2, 4)
        sigma = 10 ** draw.uniform(-1, 1)
        sent[:], noted[:] = [torch.from_numpy(numbers.normal(size=4) * sigma)], []
        for server in servers:
            server.method, server.sigma = method, sigma
            server.privacy = Privacy(sigma=sigma, noise="secure", unit=unit, memory=memory, trust="local")  # type: ignore[arg-type]
        one, other = (server.ask(x, **terms) for server in servers)
        assert type(one) is type(other), "whether a party answers does not depend on a record"
        if not isinstance(one, Reply) or not isinstance(other, Reply):
            continue
        assert one.digest == other.digest
        if len(noted) == 2:  # otherwise the last message was sent again
            line = json.loads((tmp_path / "7" / "ledger.jsonl").read_text().splitlines()[-1])
            assert float((noted[0] - noted[1]).norm()) <= line["sigma"] / line["record"] * (1 + 1e-6)
            compared += 1
        if draw.random() < 0.7:
            done = max(terms["round"], one.round) + 1
            accepted = {"round": done, "record.since": done, "record.digest": one.digest} | {
                "record.accepted": accepted["record.accepted"] + 1
            }
        if draw.random() < 0.8:
            for server in servers:
                server.dropped = ""
    assert compared, "no message was made"
