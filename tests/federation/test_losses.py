"""Lost replies, disks and ledgers are noticed, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normec.errors import UsageError
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.screening import Limits

from .faulty_network import SETTINGS, FaultyFederation, settled


def test_a_lost_reply_is_sent_again_bit_for_bit(tmp_path: Path) -> None:
    federation = settled(tmp_path)
    federation.ask("a")
    first = federation.flying.pop()[1]["message"].tobytes()
    federation.ask("b")
    federation.deliver(0)
    federation.close()  # a round without a
    paid = read_releases(federation.home("a")).count()
    federation.ask("a")
    assert federation.flying[0][1]["message"].tobytes() == first
    assert read_releases(federation.home("a")).count() == paid
    federation.deliver(0)
    federation.close()
    federation.ask("a")
    assert federation.flying[0][1]["message"].tobytes() != first
    assert read_releases(federation.home("a")).count() == paid + 1
    federation.settle()
    federation.server.close()


def test_a_wiped_disk_goes_on_from_the_servers_row_and_is_charged(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, *SETTINGS["noisy memory"])
    for _ in range(3):
        federation.settle()
    accepted = federation.server.state.parties["c"].accepted
    federation.ask("c")  # a message that nobody will ever see
    federation.lose(0)
    federation.wipe("c")
    federation.settle()
    releases = read_releases(federation.home("c"))
    assert releases.recovered() == accepted + 1
    assert releases.count() == accepted + 1 + 2
    assert federation.server.state.parties["c"].accepted == accepted + 2
    assert federation.server.state.parties["c"].handshakes == 2
    federation.server.close()


def test_a_party_that_lost_its_ledger_goes_on_once_its_folder_is_empty(tmp_path: Path) -> None:
    """The account is charged for all messages that may have been sent before the disks were lost."""
    federation = settled(tmp_path)
    federation.ask("a")
    federation.lose(0)
    federation.wipe("a")
    federation.ask("a")
    federation.deliver(0)
    federation.ask("a")  # the first message after the lost disk, lost as well
    federation.lose(0)
    federation.wipe("a", "ledger")
    federation.settle()
    assert read_releases(federation.home("a")).count() >= len(federation.left["a"])
    federation.server.close()


def test_two_lost_disks_in_one_round(tmp_path: Path) -> None:
    """A row that was sent for an earlier handshake is not used; both lost messages are charged."""
    federation = settled(tmp_path)
    accepted = federation.server.state.parties["a"].accepted
    for _ in range(2):
        federation.wipe("a")
        federation.ask("a")  # handshake
        federation.deliver(0)
        federation.ask("a")  # its message, lost
        federation.lose(0)
    federation.settle()
    assert len(federation.left["a"]) == accepted + 3  # two in the loop, the second of them again, and one more
    assert (
        read_releases(federation.home("a")).count() == accepted + 4
    )  # one may have been under way before the first loss
    federation.server.close()


def test_parties_that_are_away_forget_as_all_do(tmp_path: Path) -> None:
    federation = settled(tmp_path, "noisy memory that forgets")
    before = federation.server.state.run.memory.clone()
    federation.ask("c")  # made now, accepted three rounds later
    for _ in range(3):
        federation.answer("a")
        federation.close()
    torch.testing.assert_close(federation.server.state.run.memory[1:], before[1:] * 0.9**3)
    federation.deliver(0)
    federation.close()
    federation.settle()  # compares the parties' memories with the rows
    federation.server.close()


def test_an_overtaken_request_changes_nothing(tmp_path: Path) -> None:
    federation = settled(tmp_path)
    old = federation.server.requests()["a"]
    federation.settle()
    federation.ask("a")
    sent, paid = federation.flying.pop()[1]["message"].tobytes(), read_releases(federation.home("a")).count()
    federation.carry(old)
    assert federation.flying.pop()[1]["reason"] == "late"
    federation.ask("a")
    assert federation.flying.pop()[1]["message"].tobytes() == sent
    assert read_releases(federation.home("a")).count() == paid
    federation.server.close()


def test_a_row_sent_for_an_earlier_handshake_is_not_used(tmp_path: Path) -> None:
    federation = settled(tmp_path)
    federation.wipe("a")
    federation.ask("a")
    federation.deliver(0)
    offered = federation.server.requests()["a"]
    assert offered.record.row is not None
    federation.carry(offered)  # used by the party that asked for it; its message is lost
    federation.lose(0)
    federation.wipe("a")
    federation.ask("a")  # handshake
    federation.lose(0)
    federation.carry(offered)
    assert federation.flying.pop()[1]["reason"] == "state"
    federation.settle()
    federation.server.close()


def test_an_earlier_handshake_that_arrives_last(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, *SETTINGS["noisy memory"])
    federation.ask("a")
    federation.wipe("a")
    federation.ask("a")
    for number in (1, 0):  # the younger first
        federation.deliver(number, keep=True)
    assert federation.server.state.parties["a"].handshakes == 2
    federation.settle()
    federation.server.close()


def test_the_count_of_handshakes_and_drops_survives_the_server(tmp_path: Path) -> None:
    federation = FaultyFederation(tmp_path, *SETTINGS["noisy memory"])
    federation.ask("a")
    federation.deliver(0)
    sent = federation.server.requests()["a"].record
    federation.restart()
    assert federation.server.requests()["a"].record.token == sent.token != ""
    federation.settle()
    federation.server.collector.limits = Limits(1e-9, 1e-9, 1e-9)
    federation.ask("b")
    federation.deliver(0)
    sent = federation.server.requests()["b"].record
    federation.restart()
    again = federation.server.requests()["b"].record
    assert (again.dropped, again.lost) == (sent.dropped, sent.lost)
    assert sent.dropped != ""
    federation.settle()
    assert read_releases(federation.home("b")).count() == len(federation.left["b"])
    federation.server.close()


def test_a_round_with_too_few_answers_stays_open(tmp_path: Path) -> None:
    federation = settled(tmp_path, "no noise", minimum=2)
    rounds = federation.server.round
    federation.ask("a")
    federation.deliver(0)
    assert not federation.server.ready
    with pytest.raises(UsageError, match="has 1 answers and needs 2"):
        federation.server.close_round()
    assert federation.server.round == rounds
    federation.ask("b")
    federation.deliver(0)
    federation.close()
    assert federation.server.round == rounds + 1
    federation.settle()
    federation.server.close()
