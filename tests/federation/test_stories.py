"""Lost, late and repeated messages, deaths at every write, wiped disks: the invariants hold after each story."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normec import DPSGD, Clip21, Method, NormEC, Privacy, SmoothedNorm
from normec.errors import UsageError
from normec.federation.account import read_releases

from .stories import NODES, Story

NOISY = Privacy(sigma=0.5, noise="secure", memory="noisy")
SETTINGS: dict[str, tuple[Method, Privacy | None]] = {
    "no noise": (NormEC(0.1, 0.5, server_norm=False), None),
    "noisy memory": (NormEC(0.1, 0.5), NOISY),
    "noisy memory that forgets": (NormEC(0.1, 0.5, decay=0.1), NOISY),
    "clean memory": (Clip21(0.5), Privacy(sigma=0.5, noise="secure", memory="clean")),
    "central": (NormEC(0.1, 0.5), Privacy(sigma=0.5, noise="secure", trust="central")),
    "no memory": (DPSGD(SmoothedNorm(0.1)), Privacy(sigma=0.5, noise="secure")),
}

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
@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
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
    method, privacy = SETTINGS[name]
    story = Story(tmp_path, method, privacy)
    story.settle()
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


def test_a_lost_reply_is_sent_again_bit_for_bit(tmp_path: Path) -> None:
    method, privacy = SETTINGS["noisy memory"]
    story = Story(tmp_path, method, privacy)
    story.settle()
    story.ask("a")
    first = story.flying.pop()[1]["message"].tobytes()
    story.ask("b")
    story.deliver(0)
    story.close()  # a round without a
    paid = read_releases(story.home("a")).count()
    story.ask("a")
    assert story.flying[0][1]["message"].tobytes() == first
    assert read_releases(story.home("a")).count() == paid
    story.deliver(0)
    story.close()
    story.ask("a")
    assert story.flying[0][1]["message"].tobytes() != first
    assert read_releases(story.home("a")).count() == paid + 1
    story.settle()
    story.server.close()


def test_a_wiped_disk_goes_on_from_the_servers_row_and_is_charged(tmp_path: Path) -> None:
    method, privacy = SETTINGS["noisy memory"]
    story = Story(tmp_path, method, privacy)
    for _ in range(3):
        story.settle()
    accepted = story.server.state.seats["c"].accepted
    story.ask("c")  # a message that nobody will ever see
    story.lose(0)
    story.wipe("c")
    story.settle()
    releases = read_releases(story.home("c"))
    assert releases.recovered() == accepted + 1
    assert releases.count() == accepted + 1 + 2
    assert story.server.state.seats["c"].accepted == accepted + 2
    assert len(story.server.state.seats["c"].tokens) == 2
    story.server.close()


def test_a_lost_ledger_is_made_good_before_anything_leaves(tmp_path: Path) -> None:
    """The state remembers what was paid, so the account is whole again before the message under way is accepted."""
    method, privacy = SETTINGS["noisy memory"]
    story = Story(tmp_path, method, privacy)
    story.settle()
    story.ask("a")
    story.lose(0)
    story.wipe("a")
    story.ask("a")
    story.deliver(0)
    story.ask("a")  # a second life's first message, lost as well
    story.lose(0)
    story.wipe("a", "ledger")
    story.ask("a")
    assert read_releases(story.home("a")).count() == len(story.left["a"]) == 4
    story.settle()
    story.server.close()


def test_two_lives_in_one_round(tmp_path: Path) -> None:
    """A row that was offered to a life that ended is not taken by the next; both lost messages are charged."""
    method, privacy = SETTINGS["noisy memory"]
    story = Story(tmp_path, method, privacy)
    story.settle()
    accepted = story.server.state.seats["a"].accepted
    for _ in range(2):
        story.wipe("a")
        story.ask("a")  # hello
        story.deliver(0)
        story.ask("a")  # its message, lost
        story.lose(0)
    story.settle()
    assert len(story.left["a"]) == accepted + 3  # two in the loop, the second of them again, and one more
    assert read_releases(story.home("a")).count() == accepted + 4  # the first life may have had one under way
    story.server.close()


def test_parties_that_are_away_forget_as_all_do(tmp_path: Path) -> None:
    method, privacy = SETTINGS["noisy memory that forgets"]
    story = Story(tmp_path, method, privacy)
    story.settle()
    before = story.server.state.run.memory.clone()
    story.ask("c")  # made now, accepted three rounds later
    for _ in range(3):
        story.answer("a")
        story.close()
    torch.testing.assert_close(story.server.state.run.memory[1:], before[1:] * 0.9**3)
    story.deliver(0)
    story.close()
    story.settle()  # compares the parties' memories with the rows
    story.server.close()


def test_an_overtaken_request_changes_nothing(tmp_path: Path) -> None:
    method, privacy = SETTINGS["noisy memory"]
    story = Story(tmp_path, method, privacy)
    story.settle()
    old = story.server.requests()["a"]
    story.settle()
    story.ask("a")
    sent, paid = story.flying.pop()[1]["message"].tobytes(), read_releases(story.home("a")).count()
    story.carry(old)
    assert story.flying.pop()[1]["reason"] == "late"
    story.ask("a")
    assert story.flying.pop()[1]["message"].tobytes() == sent
    assert read_releases(story.home("a")).count() == paid
    story.server.close()


def test_a_round_with_too_few_answers_stays_open(tmp_path: Path) -> None:
    method, _ = SETTINGS["no noise"]
    story = Story(tmp_path, method, None, minimum=2)
    story.settle()
    rounds = story.server.round
    story.ask("a")
    story.deliver(0)
    assert not story.server.ready
    with pytest.raises(UsageError, match="has 1 answers and needs 2"):
        story.server.close_round()
    assert story.server.round == rounds
    story.ask("b")
    story.deliver(0)
    story.close()
    assert story.server.round == rounds + 1
    story.settle()
    story.server.close()
