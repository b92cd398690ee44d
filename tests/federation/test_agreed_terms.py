"""Agreed terms at a party: a request that keeps them is answered, and every change of one is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from normec import Privacy, UsageError
from normec.federation.protocol.agreed_terms import AgreedTerms
from normec.federation.protocol.departure import departures, leave
from normec.federation.protocol.journal import read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.terms import MethodTerms, PlanTerms, PrivacyTerms
from normec.federation.protocol.wire import Record, Refusal, Reply, Request

from .faulty_network import DIMENSION, Quadratic
from .hostile import METHOD, SIGMA, HostileServer, zeros

POLICY = Policy(epsilon=8.0, methods=["normec", "clip21"], trusts=["local", "central"])


def first() -> Request:
    terms = PrivacyTerms.of(Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local"), SIGMA, METHOD)
    plan = PlanTerms(seed=7, batch_size=0, rounds=1000)
    return Request("trial~0", "a", 0, 0, 3, zeros(DIMENSION), MethodTerms.of(METHOD), terms, plan, Record())


AGREED = AgreedTerms.of(first())


def asking(folder: Path, agreed: AgreedTerms = AGREED) -> HostileServer:
    return HostileServer(Party(folder, POLICY, Quadratic(), agreed={"trial": agreed}), zeros(DIMENSION))


def test_a_request_that_keeps_the_terms_is_answered(tmp_path: Path) -> None:
    assert isinstance(asking(tmp_path).ask(), Reply)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"privacy__sigma": 11.0}, "privacy.sigma = 11.0, the agreed terms have 10.0"),
        ({"privacy__memory": "clean"}, "privacy.memory = 'clean'"),
        ({"privacy__trust": "central"}, "privacy.trust = 'central'"),
        ({"plan__seed": 8}, "plan.seed = 8"),
        ({"plan__rounds": 2000}, "plan.rounds = 2000"),
        ({"plan__batch_size": 5}, "plan.batch_size = 5"),
        ({"parties": 30}, "parties = 30"),
        ({"index": 1}, "index = 1, the agreed terms have 0; parties must be registered in the order of the terms"),
        ({"node": "b"}, "node = 'b'"),
        ({"run": f"trial2~{16 * '0'}"}, "signed no terms of run trial2"),
        ({"method__spec": json.dumps({**METHOD.spec(), "beta": 0.6}, sort_keys=True)}, "method.spec"),
        ({"method__name": "clip21"}, "method.name = 'clip21'"),
    ],
)
def test_a_change_of_the_terms_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    server = asking(tmp_path)
    known = {name.replace("__", ".") for name in change}
    assert known <= server.fields().keys(), "the name of a field on the wire"
    answer = server.ask(**change)
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
    assert named in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    assert not (tmp_path / "ledger.jsonl").exists()


def test_another_model_is_refused(tmp_path: Path) -> None:
    answer = asking(tmp_path).ask(zeros(DIMENSION + 1))
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"


def test_the_noise_of_each_round_is_agreed(tmp_path: Path) -> None:
    agreed = dataclasses.replace(AGREED, sigmas=(SIGMA, 2 * SIGMA))
    server = asking(tmp_path, agreed)
    assert isinstance(server.ask(), Reply)
    assert agreed.check(dataclasses.replace(first(), round=1)) is not None
    louder = dataclasses.replace(first().privacy, sigma=2 * SIGMA)
    assert agreed.check(dataclasses.replace(first(), round=1, privacy=louder)) is None


def test_terms_in_plain_types_come_back() -> None:
    facts = json.loads(json.dumps(AGREED.to_facts()))
    assert AgreedTerms.from_facts(facts) == AGREED
    assert AGREED.check(AGREED.first_request()) is None
    for damaged in ({}, {**facts, "plan": None}, {**facts, "more": 1}, {**facts, "sigmas": ["x"]}):
        with pytest.raises(UsageError, match="cannot be read"):
            AgreedTerms.from_facts(damaged)


def test_a_party_that_left_refuses_the_run_for_good(tmp_path: Path) -> None:
    server = asking(tmp_path)
    assert isinstance(server.ask(), Reply)
    leave(tmp_path, "trial")
    for again in (server, asking(tmp_path)):
        answer = again.ask()
        assert isinstance(answer, Refusal)
        assert answer.reason == "terms"
    assert "this party left run trial" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    other = HostileServer(Party(tmp_path, POLICY, Quadratic()), zeros(DIMENSION), run="other")
    assert isinstance(other.ask(), Reply), "other runs go on"
    with pytest.raises(UsageError, match="left run trial on"):
        leave(tmp_path, "trial")
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        leave(tmp_path, "trial~1")
    assert list(departures(tmp_path)) == ["trial"]
    (tmp_path / "departures.json").write_text("[]")
    answer = other.ask()
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
