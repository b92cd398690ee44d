"""A party's folder against its server and its accidents: lost ledgers, invented runs, floods of bad requests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normec import UsageError
from normec.federation.protocol import journal, party_state
from normec.federation.protocol.account import FILE, read_releases
from normec.federation.protocol.journal import Journal, read_journal
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.spending import spending
from normec.federation.protocol.wire import Refusal, Reply

from .faulty_network import DIMENSION, Quadratic
from .hostile import HostileServer, zeros

POLICY = Policy(epsilon=8.0)


def server(folder: Path, run: str = "trial", policy: Policy = POLICY) -> HostileServer:
    return HostileServer(Party(folder, policy, Quadratic(), node="a"), zeros(DIMENSION), run=run)


def spent(folder: Path, messages: int = 3) -> HostileServer:
    """A server that a new party has sent so many messages to."""
    found = server(folder)
    for _ in range(messages):
        assert isinstance(found.ask(), Reply)
    return found


def ledger(folder: Path) -> list[Path]:
    return [folder / FILE, folder / (FILE + ".head")]


def refused(server: HostileServer, why: str) -> None:
    answer = server.ask()
    assert isinstance(answer, Refusal)
    assert answer.reason == "failed"
    last = read_journal(server.party.folder / "events.jsonl")[-1]
    assert why in last["exact"]
    assert "restore the ledger from a copy" in last["exact"]


@pytest.mark.parametrize("run", ["trial", "another"])
def test_a_deleted_ledger_does_not_bring_a_new_budget(run: str, tmp_path: Path) -> None:
    spent(tmp_path)
    for path in ledger(tmp_path):
        path.unlink()
    refused(server(tmp_path, run), "knows of 4 lines")
    with pytest.raises(UsageError, match="restore the ledger from a copy"):
        spending(tmp_path, POLICY)


def test_a_ledger_that_was_set_back_is_noticed(tmp_path: Path) -> None:
    asking = spent(tmp_path)
    older = tmp_path / "older"
    older.mkdir()
    for path in ledger(tmp_path):
        shutil.copy(path, older)
    assert isinstance(asking.ask(), Reply)
    newer = [path.read_bytes() for path in ledger(tmp_path)]
    for path in ledger(tmp_path):
        shutil.copy(older / path.name, path)
    refused(server(tmp_path, "another"), "knows of 5 lines")
    for path, contents in zip(ledger(tmp_path), newer, strict=True):
        path.write_bytes(contents)  # a copy cures it
    assert isinstance(server(tmp_path, "another").ask(), Reply)


def test_a_state_that_is_replaced_while_it_is_read_does_not_end_what_shows_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`normec federation local` shows what its parties have spent while they answer and replace their states."""
    spent(tmp_path, messages=1)
    (state,) = (tmp_path / "runs").rglob("*.safetensors")
    data, opened = state.read_bytes(), torch.UntypedStorage.from_file
    party_state.save(state, party_state.PartyState("token", {"memory": torch.zeros(1, 10_000)}))

    def replaced(*arguments: Any, **more: Any) -> Any:
        """Whoever opens the file a second time finds another one."""
        state.write_bytes(data)
        return opened(*arguments, **more)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert spending(tmp_path, POLICY)["releases"] == 1


def test_a_mark_alone_knows_that_a_ledger_was_begun(tmp_path: Path) -> None:
    spent(tmp_path)
    for path in ledger(tmp_path):
        path.unlink()
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(UsageError, match="is missing, although"):
        read_releases(tmp_path)
    refused(server(tmp_path), "says that it was begun")


def test_invented_runs_leave_a_limited_number_of_files(tmp_path: Path) -> None:
    asking = spent(tmp_path, 1)
    for number in range(2 * party_state.MOST_WAITING):
        answer = server(tmp_path, f"invented-{number}").send(server(tmp_path, f"invented-{number}").fields())
        assert isinstance(answer, Refusal)
        assert answer.reason == "state"
    assert len(list((tmp_path / "runs").rglob("*.safetensors"))) == party_state.MOST_WAITING + 1
    assert len(list((tmp_path / "runs").iterdir())) == party_state.MOST_WAITING + 1
    token = asking.token
    assert isinstance(asking.ask(), Reply)  # the run that was under way has kept its state
    assert asking.token == token
    assert isinstance(server(tmp_path, "new").ask(), Reply)
    assert read_releases(tmp_path).count() == 3


def test_runs_without_noise_are_limited_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party_state, "MOST_RUNS", 5)
    policy = Policy(allow_without_noise=True)
    answers = []
    for number in range(8):
        asking = server(tmp_path, f"run-{number}", policy)
        asking.privacy = None
        answers.append(asking.ask())
    assert [type(answer) for answer in answers] == [Reply] * 5 + [Refusal] * 3
    assert "remove those that are over" in read_journal(tmp_path / "events.jsonl")[-1]["exact"]
    shutil.rmtree(tmp_path / "runs" / f"run-0~{asking.number}")
    asking = server(tmp_path, "run-8", policy)
    asking.privacy = None
    assert isinstance(asking.ask(), Reply)


def test_bad_requests_fill_a_journal_only_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 2000)
    for number in range(50):
        bad = server(tmp_path, f"run-{number}")  # a party opened anew, as for every request
        assert isinstance(bad.send(bad.fields(privacy__sigma=0.001)), Refusal)
    path = tmp_path / "events.jsonl"
    lines = read_journal(path)
    assert path.stat().st_size < 3000
    assert [line["event"] for line in lines].count("full") == 1
    assert lines[-1]["event"] == "full"
    assert {line["event"] for line in lines[:-1]} == {"refused"}


def test_a_long_text_is_cut_in_the_journal(tmp_path: Path) -> None:
    own = Journal(tmp_path / "events.jsonl")
    own.note("failed", exact="x" * 10**6)
    assert (tmp_path / "events.jsonl").stat().st_size < 1000


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir(parents=True)
    bad = server(tmp_path)
    answer = bad.send(bad.fields(privacy__sigma=0.001))
    assert isinstance(answer, Refusal)
    assert answer.reason == "noise"


def test_a_folder_that_was_restored_is_refused_by_a_witness_outside_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "party"
    policy = POLICY.model_copy(update={"witness": str(tmp_path / "witness")})
    asking = server(folder, policy=policy)
    assert isinstance(asking.ask(), Reply)
    shutil.copytree(folder, tmp_path / "older")
    assert isinstance(asking.ask(), Reply)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "older", folder)
    refused(server(folder, "another", policy), "the witness")
    with pytest.raises(UsageError, match="the witness"):
        spending(folder, policy)
    shutil.rmtree(folder)
    refused(server(folder, policy=policy), "the witness")
