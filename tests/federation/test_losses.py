"""What is lost is noticed and mended: replies, disks, ledgers, promises; one story each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normec.errors import UsageError
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.screening import Limits

from .stories import SETTINGS, Story, settled


def test_a_lost_reply_is_sent_again_bit_for_bit(tmp_path: Path) -> None:
    story = settled(tmp_path)
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
    story = Story(tmp_path, *SETTINGS["noisy memory"])
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
    assert story.server.state.seats["c"].lives == 2
    story.server.close()


def test_a_party_that_lost_its_ledger_goes_on_once_its_folder_is_empty(tmp_path: Path) -> None:
    """The second life is charged for all that the first two may have sent, the messages that were lost included."""
    story = settled(tmp_path)
    story.ask("a")
    story.lose(0)
    story.wipe("a")
    story.ask("a")
    story.deliver(0)
    story.ask("a")  # a second life's first message, lost as well
    story.lose(0)
    story.wipe("a", "ledger")
    story.settle()
    assert read_releases(story.home("a")).count() >= len(story.left["a"])
    story.server.close()


def test_two_lives_in_one_round(tmp_path: Path) -> None:
    """A row that was offered to a life that ended is not taken by the next; both lost messages are charged."""
    story = settled(tmp_path)
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
    story = settled(tmp_path, "noisy memory that forgets")
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
    story = settled(tmp_path)
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


def test_a_row_offered_to_an_earlier_life_is_not_taken(tmp_path: Path) -> None:
    story = settled(tmp_path)
    story.wipe("a")
    story.ask("a")
    story.deliver(0)
    offered = story.server.requests()["a"]
    assert offered.record.row is not None
    story.carry(offered)  # taken by the life that asked for it; its message is lost
    story.lose(0)
    story.wipe("a")
    story.ask("a")  # hello
    story.lose(0)
    story.carry(offered)
    assert story.flying.pop()[1]["reason"] == "state"
    story.settle()
    story.server.close()


def test_a_hello_of_an_earlier_life_that_comes_last(tmp_path: Path) -> None:
    story = Story(tmp_path, *SETTINGS["noisy memory"])
    story.ask("a")
    story.wipe("a")
    story.ask("a")
    for number in (1, 0):  # the younger first
        story.deliver(number, keep=True)
    assert story.server.state.seats["a"].lives == 2
    story.settle()
    story.server.close()


def test_what_a_party_is_told_of_hellos_and_drops_outlives_the_server(tmp_path: Path) -> None:
    story = Story(tmp_path, *SETTINGS["noisy memory"])
    story.ask("a")
    story.deliver(0)
    told = story.server.requests()["a"].record
    story.restart()
    assert story.server.requests()["a"].record.token == told.token != ""
    story.settle()
    story.server.intake.limits = Limits(1e-9, 1e-9, 1e-9)
    story.ask("b")
    story.deliver(0)
    told = story.server.requests()["b"].record
    story.restart()
    again = story.server.requests()["b"].record
    assert (again.dropped, again.lost) == (told.dropped, told.lost)
    assert told.dropped != ""
    story.settle()
    assert read_releases(story.home("b")).count() == len(story.left["b"])
    story.server.close()


def test_a_round_with_too_few_answers_stays_open(tmp_path: Path) -> None:
    story = settled(tmp_path, "no noise", minimum=2)
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
