"""Lost, late and repeated messages, deaths at every write, wiped disks: the invariants hold after each of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normec.federation.protocol.account import read_releases

from .faulty_network import NODES, SETTINGS, FaultyFederation, settled

node = st.sampled_from(NODES)
some = st.integers(0, 5)
point = st.integers(0, 40)
ACTIONS = st.one_of(
    st.tuples(st.just("answer"), node),
    st.tuples(st.just("ask"), node),
    st.tuples(st.just("ask"), node, point),
    st.tuples(st.just("ask_late"), some),
    st.tuples(st.just("deliver"), some),
    st.tuples(st.just("deliver"), some),
    st.tuples(st.just("repeat"), some),
    st.tuples(st.just("lose"), some),
    st.tuples(st.just("wipe"), node, st.sampled_from(["all", "state", "ledger"])),
    st.tuples(st.just("close")),
    st.tuples(st.just("close"), point),
    st.tuples(st.just("restart")),
)


def play(federation: FaultyFederation, action: tuple[Any, ...]) -> None:
    match action:
        case ("repeat", number):
            federation.deliver(number, keep=True)
        case (name, *rest):
            getattr(federation, name)(*rest)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=5, max_size=40))
def test_any_sequence_of_faults(name: str, actions: list[tuple[Any, ...]]) -> None:
    method, privacy = SETTINGS[name]
    with TemporaryDirectory() as folder:
        federation = FaultyFederation(Path(folder), method, privacy)
        federation.settle()  # everyone has a memory to lose
        for action in actions:
            play(federation, action)
        federation.settle()
        federation.server.close()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["noisy memory", "central"])
def test_a_party_that_dies_at_every_write_of_a_round(name: str, tmp_path: Path) -> None:
    federation = settled(tmp_path, name)
    for at in range(60):
        before = len(federation.left["b"])
        federation.ask("b", at)
        if len(federation.left["b"]) > before:  # it lived: there is no such write
            break
        federation.settle()
    else:
        pytest.fail("a party never got through its round")
    assert at > 10
    federation.settle()
    paid = read_releases(federation.home("b")).count()
    assert len(federation.left["b"]) < paid  # it died between paying and sending: paid for, never sent
    federation.server.close()


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", ["noisy memory", "central"])
def test_a_server_that_dies_at_every_write_of_a_round(name: str, tmp_path: Path) -> None:
    method, privacy = SETTINGS[name]
    federation = FaultyFederation(tmp_path, method, privacy, minimum=len(NODES))
    federation.settle()
    for at in range(80):
        rounds = federation.server.round
        for one in NODES:
            federation.ask(one)
            federation.deliver(0)
        sent = {one: len(federation.left[one]) for one in NODES}
        held = federation.server
        federation.close(at)
        if federation.server is held:
            break
        # Whatever was not counted is the same message again, not a new one.
        for one in NODES if federation.server.round == rounds else ():
            federation.ask(one)
            federation.deliver(0)
            assert len(federation.left[one]) == sent[one]
    else:
        pytest.fail("the server never got through its round")
    assert at > 10
    federation.settle()
    federation.server.close()
