"""The rounds of the server with hostile and silent parties, without a network, by a clock that the test moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import NormEC
from normec.federation.flower.mailbox import Incoming
from normec.federation.flower.presence import Timeouts
from normec.federation.flower.run_parties import OnlineParty
from normec.federation.flower.server_loop import ASKS, run_rounds
from normec.federation.flower.suspension import CLEAN, DOUBLINGS, HANDSHAKES, SHORTEST, Suspensions
from normec.federation.protocol.coordinator import Coordinator
from normec.federation.protocol.wire import Refusal, Reply, Request, chained, to_fields

from .in_process import plan

NODES = ["a", "b", "mallory"]
LIMIT = 600.0
ANSWER = 0.1
Behaviour = Callable[[Request], Incoming | None]
tokens = itertools.count()


def honest(request: Request) -> Incoming:
    step, message = request.record.accepted + 1, request.x * 0
    digest = chained(request.record.digest, step, message)
    return incoming(request, to_fields(Reply(request.run, request.node, request.round, step, digest, message)))


def incoming(request: Request, fields: Mapping[str, Any] | None, **more: Any) -> Incoming:
    return Incoming(NODES.index(request.node), request.round, dict(fields) if fields is not None else None, **more)


def handshake(request: Request) -> Incoming:
    token = f"{next(tokens):032x}"
    return incoming(request, to_fields(Refusal(request.run, request.node, request.round, "state", token)))


def rubbish(request: Request) -> Incoming:
    return incoming(request, None, fault="it cannot be read")


def lost(request: Request) -> Incoming:
    return incoming(request, None, lost=True)


def silent(_: Request) -> None:
    return None


class Play:
    """A mailbox, a roster and a clock. An answer takes `ANSWER` seconds, and a look into an empty mailbox its limit."""

    def __init__(
        self, folder: Path | None, mallory: Behaviour, rounds: int, minimum: int = 2, restless: bool = False
    ) -> None:
        self.now, self.asks, self.said = 0.0, Counter[str](), list[str]()
        self._incoming: list[Incoming] = []
        self._behaviour: dict[str, Behaviour] = {"a": honest, "b": honest, "mallory": mallory}
        self._restless = restless
        self.server = Coordinator(
            NormEC(0.1, 0.5), torch.zeros(4), NODES, plan(rounds), run="play", folder=folder, minimum=minimum
        )

    def post(self, requests: Mapping[int, Request], ttl: float) -> None:  # noqa: ARG002
        for request in requests.values():
            self.asks[request.node] += 1
            answer = self._behaviour[request.node](request)
            self._incoming += [answer] if answer is not None else []

    def next(self, seconds: float) -> Incoming | None:
        if self._incoming:
            self.now += ANSWER
            return self._incoming.pop(0)
        self.now += seconds
        return None

    def online(self) -> dict[str, OnlineParty]:
        since = str(self.now) if self._restless else "always"
        return {
            name: OnlineParty(number, since if name == "mallory" else "always") for number, name in enumerate(NODES)
        }

    def name(self, node: int) -> str:
        return NODES[node]

    def run(self, wait: float = 1e9) -> None:
        run_rounds(self.server, self, self, Timeouts(LIMIT, wait), self.said.append, lambda: self.now)  # type: ignore[arg-type]
        self.server.close()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "mallory", [handshake, rubbish, lost], ids=["handshake after handshake", "rubbish", "always lost"]
)
def test_a_party_that_talks_nonsense_does_not_hold_rounds_up(mallory: Behaviour, tmp_path: Path) -> None:
    rounds = 50
    play = Play(tmp_path, mallory, rounds)
    play.run()
    assert play.server.round == rounds
    assert play.now < rounds * 30  # the limit of a round is 600 s
    assert play.asks["a"] == rounds
    assert play.asks["mallory"] <= rounds


def test_a_silent_party_holds_up_one_round() -> None:
    rounds = 300
    play = Play(None, silent, rounds)
    play.run()
    assert play.server.round == rounds
    assert play.now < 2 * LIMIT  # the first round waits until its limit, the others do not wait
    suspended = [line for line in play.server.journal.lines if line["event"] == "suspended"]
    assert {line["party"] for line in suspended} == {"mallory"}
    assert "silent" in suspended[0]["why"]


@pytest.mark.slow
def test_a_party_after_a_fault_is_asked_but_not_waited_for() -> None:
    turns = itertools.count()
    play = Play(None, lambda request: rubbish(request) if next(turns) < 1 else None, 300)
    play.run()
    assert play.server.round == 300
    assert play.asks["mallory"] > 1
    assert play.now < LIMIT


@pytest.mark.slow
def test_a_party_is_waited_for_again_after_good_messages() -> None:
    turns = itertools.count()

    def mallory(request: Request) -> Incoming | None:
        turn = next(turns)
        return rubbish(request) if turn < 1 else honest(request) if turn <= CLEAN else None

    play = Play(None, mallory, 300)
    play.run()
    assert play.server.state.parties["mallory"].accepted == CLEAN
    assert LIMIT < play.now < 2 * LIMIT  # then it was silent, and one round waited for it


def test_a_party_that_comes_and_goes_is_not_asked_for_ever(tmp_path: Path) -> None:
    play = Play(tmp_path, silent, 1, restless=True)
    play.run()
    assert play.server.round == 1
    assert play.asks["mallory"] <= ASKS


def test_a_party_that_mends_its_ways_is_asked_again_and_taken(tmp_path: Path) -> None:
    turns = itertools.count()
    play = Play(tmp_path, lambda request: rubbish(request) if next(turns) < 3 else honest(request), 5, minimum=3)
    play.run()
    assert play.server.round == 5
    assert play.server.state.parties["mallory"].accepted == 5
    assert 7 * SHORTEST <= play.now < LIMIT  # suspended for 1, 2 and 4 times the shortest time


def test_a_party_that_loses_its_disk_is_answered_at_once(tmp_path: Path) -> None:
    turns = itertools.count()
    play = Play(
        tmp_path, lambda request: handshake(request) if next(turns) < HANDSHAKES else honest(request), 1, minimum=3
    )
    play.run()
    assert play.server.state.parties["mallory"].accepted == 1
    assert play.now < SHORTEST


def test_a_round_that_nobody_completes_ends_and_says_why(tmp_path: Path) -> None:
    play = Play(tmp_path, silent, 5, minimum=3)
    play.run(wait=5 * LIMIT)
    assert play.server.round == 0
    assert play.server.stopped is not None
    assert "wait_seconds = 3000" in play.server.stopped
    assert play.now < 7 * LIMIT
    assert any("asking again" in line for line in play.said)


def test_the_time_of_a_suspension_doubles_up_to_a_limit_and_is_forgotten_after_clean_messages() -> None:
    suspensions, now = Suspensions(), 100.0
    for strike in range(DOUBLINGS + 3):
        assert suspensions.strike("m", 1.0, now) == SHORTEST * 2 ** min(strike, DOUBLINGS)
    assert suspensions.strike("m", 600.0, now) == 600.0 * 2**DOUBLINGS
    assert suspensions.suspended("m", now)
    assert not suspensions.suspended("m", now + 600.0 * 2**DOUBLINGS)
    assert not suspensions.suspended("a", now)
    for _ in range(CLEAN - 1):
        suspensions.clean("m")
    assert suspensions.strike("m", 1.0, now) == SHORTEST * 2**DOUBLINGS  # a fault in between: nothing is forgotten
    for _ in range(CLEAN * 2**DOUBLINGS):
        suspensions.clean("m")
    assert suspensions.strike("m", 1.0, now) == SHORTEST


def test_a_party_holds_rounds_up_more_and_more_rarely() -> None:
    """It is silent until the limit whenever it is waited for, and sends good messages otherwise."""
    suspensions, now, held = Suspensions(), 0.0, 0
    for _ in range(2000):
        if suspensions.trusted("m"):
            now, held = now + LIMIT, held + 1
            suspensions.strike("m", LIMIT, now)
        else:
            now += LIMIT * 2**DOUBLINGS  # it is no longer suspended
            suspensions.clean("m")
    most = sum(CLEAN * 2**times + 1 <= 2000 for times in range(DOUBLINGS)) + 2000 // (CLEAN * 2**DOUBLINGS)
    assert 2 <= held <= most + 1


def test_a_single_mistake_is_soon_forgotten() -> None:
    suspensions = Suspensions()
    suspensions.strike("a", 1.0, 0.0)
    for _ in range(CLEAN - 1):
        suspensions.clean("a")
    assert not suspensions.trusted("a")
    suspensions.clean("a")
    assert suspensions.trusted("a")
