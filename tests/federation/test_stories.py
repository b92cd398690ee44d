"""Lost, late and repeated messages, deaths at every write, wiped disks: the invariants hold after each story."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normec.federation.protocol.account import read_releases

from .stories import NODES, SETTINGS, Story, settled

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


def play(story: Story, action: tuple[Any, ...]) -> None:
    match action:
        case ("repeat", number):
            story.deliver(number, keep=True)
        case (name, *rest):
            getattr(story, name)(*rest)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=5, max_size=40))
def test_any_story(name: str, actions: list[tuple[Any, ...]]) -> None:
    method, privacy = SETTINGS[name]
    with TemporaryDirectory() as folder:
        story = Story(Path(folder), method, privacy)
        story.settle()  # everyone has a memory to lose
        for action in actions:
            play(story, action)
        story.settle()
        story.server.close()


@pytest.mark.parametrize("name", ["noisy memory", "central"])
def test_a_party_that_dies_at_every_write_of_a_round(name: str, tmp_path: Path) -> None:
    story = settled(tmp_path, name)
    for at in range(60):
        before = len(story.left["b"])
        story.ask("b", at)
        if len(story.left["b"]) > before:  # it lived: there is no such write
            break
        story.settle()
    else:
        pytest.fail("a party never got through its round")
    assert at > 10
    story.settle()
    paid = read_releases(story.home("b")).count()
    assert len(story.left["b"]) < paid  # it died between paying and sending: paid for, never sent
    story.server.close()


@pytest.mark.parametrize("name", ["noisy memory", "central"])
def test_a_server_that_dies_at_every_write_of_a_round(name: str, tmp_path: Path) -> None:
    method, privacy = SETTINGS[name]
    story = Story(tmp_path, method, privacy, minimum=len(NODES))
    story.settle()
    for at in range(80):
        rounds = story.server.round
        for one in NODES:
            story.ask(one)
            story.deliver(0)
        sent = {one: len(story.left[one]) for one in NODES}
        held = story.server
        story.close(at)
        if story.server is held:
            break
        # Whatever was not counted is the same message again, not a new one.
        for one in NODES if story.server.round == rounds else ():
            story.ask(one)
            story.deliver(0)
            assert len(story.left[one]) == sent[one]
    else:
        pytest.fail("the server never got through its round")
    assert at > 10
    story.settle()
    story.server.close()
