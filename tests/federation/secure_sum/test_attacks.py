"""Attacks of a server and of parties: each is refused by its name, and nothing is opened twice."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normec.federation.secure_sum import wire
from normec.federation.secure_sum.history import RECEIPT, Position, receipt_content, statement_of
from normec.federation.secure_sum.keys import Identity, KeyPair
from normec.federation.secure_sum.masks import Vector, add_mask, self_key
from normec.federation.secure_sum.party import Assignment, Party
from normec.federation.secure_sum.refusals import REASONS, Refused
from normec.federation.secure_sum.server import AttemptFailed, Server, Stage
from normec.federation.secure_sum.shares import combine
from normec.federation.secure_sum.wire import (
    Advert,
    Answer,
    Certificate,
    Endorsement,
    Invitation,
    KeyList,
    MaskedVector,
    Quorum,
    Refusal,
    Reveal,
    SealedShares,
    Statement,
    Survivors,
    Task,
    decode_answers,
    encode,
)

from ...support.waiting import LIMIT
from .parties import Federation, roster_of, terms_of

replace: Callable[..., Any] = msgspec.structs.replace
VICTIM = 1


def reason(answers: tuple[Answer, ...]) -> str:
    """The reason of the refusal, which must be the only answer."""
    (answer,) = answers
    assert isinstance(answer, Refusal), f"not refused: {type(answer).__name__}"
    assert answer.reason in REASONS
    return answer.reason


def at(tmp_path: Path, stage: Stage, parties: int = 5, **changes: Any) -> Federation:
    """A federation whose server has just reached a stage of the first attempt."""
    federation = Federation(tmp_path, parties, **changes)
    federation.until(stage)
    return federation


def certificate(federation: Federation, statement: Statement, signers: range | list[int]) -> Certificate:
    """A certificate for which the given parties lent their keys."""
    signed = [(party, federation.keys[party].sign("statement", encode(statement))) for party in signers]
    return Certificate(statement, tuple(signed))


# ---- the server lies about keys and terms ---------------------------------------------------------------------------


def test_a_server_that_swaps_keys_is_refused(tmp_path: Path) -> None:
    """The man in the middle: keys of another party that the server made, signed by itself or not at all."""
    federation = at(tmp_path, Stage.SHARES)
    (listed,) = federation.request(VICTIM)
    assert isinstance(listed, KeyList)
    genuine = listed.adverts[2]
    own = KeyPair(bytes(range(32)))
    for signer in (None, Identity.generate(), federation.keys[3]):
        swapped = replace(genuine, mask_key=own.public, encryption_key=own.public)
        if signer is not None:
            swapped = replace(swapped, signature=signer.sign("advert", swapped.signed_bytes))
        adverts = tuple(swapped if advert.party == 2 else advert for advert in listed.adverts)
        assert reason(federation.ask(VICTIM, KeyList(listed.attempt, adverts))) == "signature"
    mine = replace(listed.adverts[VICTIM], mask_key=own.public)
    adverts = tuple(mine if advert.party == VICTIM else advert for advert in listed.adverts)
    assert reason(federation.ask(VICTIM, KeyList(listed.attempt, adverts))) == "keys"
    assert isinstance(federation.ask(VICTIM, listed)[0], SealedShares)  # the genuine list is still answered


def test_keys_of_another_attempt_or_other_terms_are_refused(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SHARES)
    (listed,) = federation.request(VICTIM)
    assert isinstance(listed, KeyList)

    def answered(**changes: Any) -> str:
        changed = replace(listed.adverts[2], **changes)
        changed = replace(changed, signature=federation.keys[2].sign("advert", changed.signed_bytes))
        adverts = tuple(changed if advert.party == 2 else advert for advert in listed.adverts)
        return reason(federation.ask(VICTIM, KeyList(listed.attempt, adverts)))

    assert answered(attempt=7) == "keys"
    assert answered(terms=bytes(32)) == "terms"
    assert answered(mask_key=bytes(32)) == "keys"
    assert answered(encryption_key=bytes(32)) == "keys"


def test_a_second_list_of_keys_is_refused(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SHARES)
    (listed,) = federation.request(VICTIM)
    assert isinstance(listed, KeyList)
    first = federation.ask(VICTIM, listed)
    assert federation.ask(VICTIM, listed) == first
    assert reason(federation.ask(VICTIM, replace(listed, adverts=listed.adverts[:-1]))) == "repeated"


@pytest.mark.parametrize("shown", [lambda a: a[:3], lambda a: a[::-1], lambda a: (*a[:4], a[3]), lambda a: a[:1] * 5])
def test_lists_that_are_too_short_or_not_in_order_are_refused(tmp_path: Path, shown: Callable[..., Any]) -> None:
    federation = at(tmp_path, Stage.SHARES)
    (listed,) = federation.request(VICTIM)
    assert isinstance(listed, KeyList)
    assert reason(federation.ask(VICTIM, replace(listed, adverts=shown(listed.adverts)))) in ("few", "participants")


CHANGES: dict[str, Any] = {
    "sigma": 0.5,
    "minimum": 4,
    "threshold": 5,
    "colluding": 1,
    "weights": (1.0, 1.0, 1.0, 1.0, 9.0),
    "step": 0.5,
    "dimension": 6,
    "method": "gd",
    "rounds": 5,
    "run": "other",
    "plan": "another",
    "modulus_bits": 64,
    "roster": "00" * 32,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_terms_are_refused_and_the_log_names_the_setting(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, 5, minimum=5)
    changed = dataclasses.replace(federation.terms, **{name: CHANGES[name]})
    with caplog.at_level(logging.WARNING, "normec"):
        assert reason(federation.ask(VICTIM, Invitation(changed.canonical, 0))) == "terms"
    assert f"differ from the agreed ones in {name}" in caplog.text
    assert federation.ledgers[VICTIM].paid == []


def test_terms_that_are_not_valid_are_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5)
    terms = federation.terms.canonical
    for shown in (b"", b"{}", terms + b" ", terms.replace(b'"threshold":4', b'"threshold":2'), b"\xff\xfe"):
        assert reason(federation.ask(VICTIM, Invitation(shown, 0))) == "terms"


def test_a_roster_with_another_key_belongs_to_other_terms(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5)
    other = roster_of([*federation.keys[:4], Identity.generate()])
    assert reason(federation.ask(VICTIM, Invitation(terms_of(other).canonical, 0))) == "terms"


# ---- the server lies about who takes part ---------------------------------------------------------------------------


def task_of(federation: Federation) -> Task:
    (task,) = federation.request(VICTIM)
    assert isinstance(task, Task)
    return task


def test_false_participants_are_refused_before_anything_is_paid(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    task = task_of(federation)
    for participants, expected in {
        (0, 1, 2): "few",
        (0, 2, 3, 4): "participants",
        (0, 1, 2, 3, 7): "participants",
        (0, 1, 1, 2, 3): "participants",
        (4, 3, 2, 1, 0): "participants",
        (0, 1, 2, 3): "participants",  # with shares of party 4, who does not take part
    }.items():
        assert reason(federation.ask(VICTIM, replace(task, participants=participants))) == expected
    assert reason(federation.ask(VICTIM, replace(task, shares=task.shares[:-1]))) == "participants"
    assert reason(federation.ask(VICTIM, replace(task, payload=bytes(2**17)))) == "malformed"
    assert federation.ledgers[VICTIM].paid == []
    assert isinstance(federation.ask(VICTIM, task)[0], MaskedVector)


def test_a_vector_is_made_once_for_an_attempt(tmp_path: Path) -> None:
    """Another model, round or list of participants in the same attempt would need the same masks again."""
    federation = at(tmp_path, Stage.VECTORS)
    task = task_of(federation)
    first = federation.ask(VICTIM, task)
    assert federation.ask(VICTIM, task) == first
    shares = tuple(share for share in task.shares if share[0] != 4)
    for other in (
        replace(task, payload=b"another model"),
        replace(task, participants=(0, 1, 2, 3), shares=shares),
        replace(task, round=1),
    ):
        assert reason(federation.ask(VICTIM, other)) == "repeated"
    assert federation.ledgers[VICTIM].paid == [0]


class WatchedLock:
    """A lock that counts who has come to it."""

    def __init__(self) -> None:
        self._lock, self.came = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_that_ask_at_the_same_time_get_the_same_vector(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    request, ledger, party = federation.server.request(VICTIM), federation.ledgers[VICTIM], federation.parties[VICTIM]
    lock, pay = WatchedLock(), ledger.pay
    party._one_at_a_time = lock  # type: ignore[assignment]

    def last(assignment: Assignment) -> None:
        """Pay when all three threads have come to the lock."""
        assert all(lock.came.acquire(timeout=LIMIT) for _ in range(3))
        pay(assignment)

    ledger.pay = last  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        answers = {asked.result() for asked in [pool.submit(party.answer, request) for _ in range(3)]}
    assert len(answers) == 1
    assert ledger.paid == [0]


def test_a_vector_that_could_not_be_made_is_not_paid_for_again(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    federation.ledgers[VICTIM].vector = np.zeros(3, dtype=np.uint32)  # of a wrong size
    task = task_of(federation)
    assert reason(federation.ask(VICTIM, task)) == "failed"
    federation.ledgers[VICTIM].vector = None
    assert reason(federation.ask(VICTIM, task)) == "failed"
    assert federation.ledgers[VICTIM].paid == [0]


def shown_statement(federation: Federation) -> Statement:
    shown = federation.request(VICTIM)[0]
    assert isinstance(shown, Survivors)
    return shown.statement


def named(federation: Federation, statement: Statement) -> Survivors:
    """A list of survivors with genuine receipts of the parties that exist."""
    content = receipt_content(statement)
    return Survivors(
        statement, tuple(federation.keys[p].sign(RECEIPT, content) if p < 5 else bytes(64) for p in statement.survivors)
    )


def test_a_party_that_made_no_vector_is_no_survivor(tmp_path: Path) -> None:
    """If the others signed that it was, it would find its folder to be an old copy, or charge what never left."""
    federation = at(tmp_path, Stage.VECTORS)
    federation.stage(lambda party, _: party != 4)
    statement = replace(shown_statement(federation), survivors=(0, 1, 2, 3, 4))
    genuine = named(federation, statement).receipts
    other = federation.keys[4].sign(RECEIPT, receipt_content(replace(statement, attempt=1)))
    for receipts in ((), genuine[:4], (*genuine[:4], bytes(64)), (*genuine[:4], genuine[3]), (*genuine[:4], other)):
        assert reason(federation.ask(VICTIM, Survivors(statement, receipts))) == "survivors"
    assert isinstance(federation.ask(VICTIM, named(federation, shown_statement(federation)))[0], Endorsement)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"survivors": (0, 1, 2)}, "few"),
        ({"survivors": (0, 2, 3, 4)}, "survivors"),  # the party itself is called a dropout
        ({"survivors": (0, 1, 2, 3, 3)}, "survivors"),
        ({"survivors": (0, 1, 2, 3, 9)}, "survivors"),
        ({"participants": (0, 1, 2, 3)}, "survivors"),  # somebody survives who did not take part
        ({"participants": (0, 1, 2, 3), "survivors": (0, 1, 2, 3)}, "survivors"),
        ({"payload": bytes(32)}, "survivors"),  # the others were given another model
        ({"round": 1}, "round"),
        ({"terms": bytes(32)}, "terms"),
        ({"count": 1}, "history"),
        ({"history": b"\1" * 32}, "history"),
    ],
)
def test_false_survivors_are_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    federation = at(tmp_path, Stage.SIGNATURES)
    statement = shown_statement(federation)
    assert reason(federation.ask(VICTIM, named(federation, replace(statement, **change)))) == expected
    assert isinstance(federation.ask(VICTIM, named(federation, statement))[0], Endorsement)


def test_two_lists_of_survivors_are_refused(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SIGNATURES)
    statement = shown_statement(federation)
    other = replace(statement, survivors=(0, 1, 2, 3))
    first = federation.ask(VICTIM, named(federation, statement))
    assert federation.ask(VICTIM, named(federation, statement)) == first
    assert reason(federation.ask(VICTIM, named(federation, other))) == "repeated"
    # Even with a quorum for the other list, which colluding parties could give if there were enough of them.
    forged = certificate(federation, other, [0, 1, 2, 3])
    assert reason(federation.ask(VICTIM, Quorum(forged))) == "quorum"


def test_shares_are_revealed_only_for_enough_genuine_signatures(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SIGNATURES)
    statement = shown_statement(federation)
    right = certificate(federation, statement, range(5))
    assert reason(federation.ask(VICTIM, Quorum(right))) == "order"  # nothing was signed yet
    federation.ask(VICTIM, named(federation, statement))
    signatures = right.signatures
    for wrong in (
        signatures[:3],
        signatures[::-1],
        (*signatures[:3], signatures[2]),
        (*signatures[:3], (3, signatures[0][1])),
        (*signatures[:3], (3, bytes(64))),
        (*signatures[:3], (9, signatures[3][1])),
    ):
        assert reason(federation.ask(VICTIM, Quorum(replace(right, signatures=wrong)))) == "quorum"
    assert isinstance(federation.ask(VICTIM, Quorum(replace(right, signatures=signatures[:4])))[0], Reveal)


def test_no_party_reveals_both_masks_of_another(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    federation.stage(lambda party, _: party != 4)
    federation.stage()
    answers = [federation.ask(party, federation.request(party)[0])[0] for party in range(4)]
    for party, answer in enumerate(answers):
        assert isinstance(answer, Reveal)
        assert {owner for owner, _ in answer.self_shares} == {0, 1, 2, 3} - {party}
        assert {owner for owner, _ in answer.key_shares} == {4}


def vectors_for(federation: Federation, changed: dict[int, dict[str, Any]]) -> dict[int, MaskedVector]:
    """The vectors of all parties, some of which are shown changed tasks."""
    found = {}
    for party in range(len(federation.keys)):
        (task,) = federation.request(party)
        (answer,) = federation.ask(party, replace(task, **changed.get(party, {})))
        assert isinstance(answer, MaskedVector)
        found[party] = answer
    return found


def opened_by_force(
    federation: Federation, vectors: dict[int, MaskedVector], **changes: Any
) -> tuple[list[str], Vector | None]:
    """What a server that names all parties as survivors gets: the reasons of refusals, and the sum if it opens one."""
    task = federation.request(0)[0]
    assert isinstance(task, Task)
    digest_of_terms, position = federation.terms.digest, federation.parties[0]._position
    statement = statement_of(digest_of_terms, task.attempt, task.round, task.payload, task.participants, position)
    statement = replace(statement, survivors=tuple(vectors), **changes)
    named = Survivors(statement, tuple(vector.receipt for vector in vectors.values()))
    answers = {party: federation.ask(party, named)[0] for party in vectors}
    signed = [(party, one.signature) for party, one in answers.items() if isinstance(one, Endorsement)]
    reasons = [one.reason for one in answers.values() if isinstance(one, Refusal)]
    if len(signed) < federation.terms.threshold:
        return reasons, None
    quorum = Quorum(Certificate(statement, tuple(signed)))
    reveals = {party: federation.ask(party, quorum)[0] for party, _ in signed}
    total = sum(np.frombuffer(vector.vector, federation.terms.dtype) for vector in vectors.values())
    total = np.array(total, federation.terms.dtype)
    for owner in vectors:
        shares = {by: dict(one.self_shares)[owner] for by, one in reveals.items() if by != owner}  # type: ignore[union-attr]
        seed = reveals[owner].seed if owner in reveals else combine(shares)  # type: ignore[union-attr]
        add_mask(total, self_key(seed, digest_of_terms, statement.round, statement.attempt, owner), negative=True)
    return reasons, total


def test_a_server_that_forces_nothing_opens_the_sum_by_the_same_steps(tmp_path: Path) -> None:
    """The program of the attacks below works where nothing is changed."""
    federation = at(tmp_path, Stage.VECTORS)
    reasons, total = opened_by_force(federation, vectors_for(federation, {}))
    assert reasons == []
    np.testing.assert_array_equal(total, sum(ledger.made[0] for ledger in federation.ledgers))


@pytest.mark.parametrize(
    "changed",
    [
        {"payload": b"a model for one party"},
        {"participants": (0, 1, 2, 3)},
    ],
)
def test_a_task_for_one_party_opens_nothing_of_it(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Model inconsistency (Pasquini et al. 2022): the victim computes from a model that singles it out.

    Four of five parties are enough to sign and to open, so it does not help that the victim itself does not sign.
    """
    federation = at(tmp_path, Stage.VECTORS)
    if "participants" in changed:
        changed["shares"] = tuple(share for share in task_of(federation).shares if share[0] < 4)
    vectors = vectors_for(federation, {VICTIM: changed})
    reasons, total = opened_by_force(federation, vectors)
    assert reasons == ["survivors"] * 5
    assert total is None


def test_a_server_that_was_given_a_vector_for_another_model_counts_it_as_lost(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    for party, vector in vectors_for(federation, {VICTIM: {"payload": b"another model"}}).items():
        federation.server.receive(party, encode((vector,)))
    federation.server.advance()
    while federation.server.sum is None:
        federation.stage()
    federation.check(federation.server.sum)
    assert VICTIM not in federation.server.sum.survivors


# ---- the server repeats and goes back -------------------------------------------------------------------------------


def test_requests_of_past_attempts_are_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    old: list[wire.Request] = []
    federation.server.start(0, b"x")
    while federation.server.sum is None:
        old.extend(federation.request(VICTIM))
        federation.stage()
    federation.sum(1)
    federation.sum(2)
    paid = list(federation.ledgers[VICTIM].paid)
    kinds = {type(request) for request in old}
    assert kinds == {Invitation, KeyList, Task, Survivors, Quorum}
    for request in old:
        assert reason(federation.ask(VICTIM, request)) == "late"
    assert 0 not in federation.parties[VICTIM]._attempts, "secrets of past attempts are kept"
    assert federation.ledgers[VICTIM].paid == paid


def test_secrets_are_forgotten_when_the_next_vector_is_made(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.sum(0)
    assert set(federation.parties[VICTIM]._attempts) == {0, 1}
    federation.until(Stage.SIGNATURES, 1)
    assert set(federation.parties[VICTIM]._attempts) == {1}


def test_a_round_is_not_rolled_back(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    for round in range(3):
        federation.sum(round)
    federation.server.start(3, b"x")
    task = task_of(federation)
    for round in (0, 1, 4, 99):
        assert reason(federation.ask(VICTIM, replace(task, round=round))) == "round"
    assert federation.ledgers[VICTIM].paid == [0, 1, 2]
    assert isinstance(federation.ask(VICTIM, task)[0], MaskedVector)


def test_a_server_that_was_rolled_back_is_noticed(tmp_path: Path) -> None:
    """Its certificates end before those that the parties know: no statement of it continues their history."""
    federation = Federation(tmp_path, 4)
    federation.sum(0)
    federation.server.close()
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    federation.restart_server()
    federation.sum(1)
    federation.sum(2)
    federation.server.close()
    shutil.rmtree(tmp_path / "server")
    (tmp_path / "copy").rename(tmp_path / "server")
    federation.restart_server()
    for _ in range(6):  # attempts that the parties know are refused; then they make keys, which name a longer history
        with pytest.raises(AttemptFailed):
            federation.sum(1)
    assert any("knows 3 certified sums, this server 1" in report.what for report in federation.server.reports)


def test_attempts_are_limited(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    terms = federation.terms
    assert reason(federation.ask(VICTIM, Invitation(terms.canonical, terms.most_attempts))) == "late"
    assert isinstance(federation.ask(VICTIM, Invitation(terms.canonical, terms.most_attempts - 1))[0], Advert)


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.REVEALS)
    other = Federation(tmp_path / "other", 5)
    statement = federation.server._statement
    for request in (KeyList(0, ()), Task(0, 0, b"", (), ()), Survivors(statement)):
        assert reason(other.ask(VICTIM, request)) == "order"
    other.ask(VICTIM, Invitation(other.terms.canonical, 0))
    assert reason(other.ask(VICTIM, Task(0, 0, b"", (0, 1, 2, 3), ()))) == "order"
    assert reason(other.ask(VICTIM, named(federation, statement))) == "order"


# ---- an old folder, a restart, a copy of the process ----------------------------------------------------------------


def restored(tmp_path: Path, rounds: int, deposits: bool = False) -> Federation:
    """A federation in which the victim's folder is a copy from before the last `rounds` sums."""
    federation = Federation(tmp_path, 5, deposits=deposits)
    federation.sum(0)
    shutil.copytree(tmp_path / f"party-{VICTIM}", tmp_path / "backup")
    for round in range(1, 1 + rounds):
        federation.sum(round)
    federation.parties[VICTIM].close()
    shutil.rmtree(tmp_path / f"party-{VICTIM}")
    (tmp_path / "backup").rename(tmp_path / f"party-{VICTIM}")
    federation.parties[VICTIM] = federation.open(VICTIM)
    federation.exchanges = 0
    return federation


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_party_restored_from_an_old_folder_refuses(tmp_path: Path, rounds: int) -> None:
    federation = restored(tmp_path, rounds)
    paid = list(federation.ledgers[VICTIM].paid)
    for round in (1 + rounds, 2 + rounds):
        made = federation.sum(round)
        federation.check(made)
        assert VICTIM not in made.survivors
    assert federation.ledgers[VICTIM].paid == paid
    assert any(report == (VICTIM, report.attempt, "refused: restored") for report in federation.server.reports)


def test_a_server_that_hides_the_history_from_a_restored_party_opens_nothing_of_it(tmp_path: Path) -> None:
    federation = restored(tmp_path, 2)
    federation.sum(3)  # the victim prepares keys for the next attempt
    federation.server.start(4, b"x")
    vectors = vectors_for(federation, {VICTIM: {"history": (), "round": 1}})
    statement = federation.server._attempt.statement
    assert statement is not None
    statement = replace(statement, survivors=tuple(vectors))
    assert reason(federation.ask(VICTIM, named(federation, statement))) == "history"
    # The others do not sign the history that the victim knows.
    known = federation.parties[VICTIM]._position
    old = replace(statement, count=known.count, history=known.digest, round=1)
    for party in (0, 2, 3, 4):
        assert reason(federation.ask(party, named(federation, old))) == "history"
    reasons, total = opened_by_force(federation, vectors)
    assert sorted(reasons) == ["history", *["survivors"] * 4]
    assert total is None


def test_a_restored_party_that_is_one_round_behind_enters_no_sum(tmp_path: Path) -> None:
    """Its folder allows the round that the server has the others repeat, and the others are enough to sign."""
    federation = restored(tmp_path, 1)
    federation.ledgers[VICTIM].paid = [0]  # the ledger was restored from the same old copy
    federation.server._opening, federation.server.sum = None, None  # a server that says that round 1 was not opened
    federation.server.start(1, b"x")
    while federation.server.stage < Stage.VECTORS:
        federation.stage()
    reasons, total = opened_by_force(federation, vectors_for(federation, {VICTIM: {"history": ()}}))
    assert "survivors" in reasons
    assert total is None


def test_a_forged_history_is_refused(tmp_path: Path) -> None:
    federation = restored(tmp_path, 1)
    federation.sum(2)
    federation.server.start(3, b"x")
    task = task_of(federation)
    genuine = task.history
    assert len(genuine) >= 2
    without_me = replace(genuine[0].statement, survivors=(0, 2, 3, 4))
    forged = replace(genuine[0], statement=without_me)
    for shown, expected in (
        ((forged, *genuine[1:]), "quorum"),
        (genuine[1:], "history"),
        ((genuine[0], genuine[0], *genuine[1:]), "restored"),
        (genuine, "restored"),
    ):
        assert reason(federation.ask(VICTIM, replace(task, history=shown))) == expected
    assert federation.ledgers[VICTIM].paid == [0, 1]


def test_an_owner_can_accept_the_loss_and_is_charged(tmp_path: Path) -> None:
    federation = restored(tmp_path, 3, deposits=True)
    federation.ledgers[VICTIM].paid = [0]  # the ledger was restored from the same old copy
    federation.restart(VICTIM, accept_loss=True)
    federation.sum(4)
    made = federation.sum(5)
    federation.check(made)
    assert VICTIM in made.survivors
    ledger = federation.ledgers[VICTIM]
    assert ledger.recovered == [([1, 2, 3], (3, b"memory before attempt      3"))]
    assert ledger.paid == [0, 1, 2, 3, made.attempt]
    assert ledger.counted[3]


def test_a_lost_folder_is_an_old_one(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5, deposits=True)
    federation.sum(0)
    federation.sum(1)
    federation.parties[VICTIM].close()
    shutil.rmtree(tmp_path / f"party-{VICTIM}")
    federation.parties[VICTIM] = federation.open(VICTIM)
    federation.sum(2)
    assert VICTIM not in federation.sum(3).survivors
    federation.restart(VICTIM, accept_loss=True)
    federation.sum(4)
    assert VICTIM in federation.sum(5).survivors
    assert federation.ledgers[VICTIM].recovered == [([0, 1], (1, b"memory before attempt      1"))]


def test_an_old_deposit_is_refused_and_none_begins_anew(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5, deposits=True)
    federation.sum(0)
    held = tmp_path / "server" / "deposits" / f"{VICTIM}.bin"
    old = held.read_bytes()
    federation.sum(1)
    federation.parties[VICTIM].close()
    shutil.rmtree(tmp_path / f"party-{VICTIM}")
    federation.parties[VICTIM] = federation.open(VICTIM, accept_loss=True)
    federation.sum(2)
    federation.server.start(3, b"x")
    task = task_of(federation)
    assert task.deposit == held.read_bytes() != old
    for wrong in (old, task.deposit[:-1], task.deposit[:8] + old[8:]):
        assert reason(federation.ask(VICTIM, replace(task, deposit=wrong))) == "deposit"
    assert federation.ledgers[VICTIM].recovered == []
    assert isinstance(federation.ask(VICTIM, replace(task, deposit=b""))[0], MaskedVector)
    assert federation.ledgers[VICTIM].recovered == [([0, 1], None)]


def test_a_certificate_that_comes_late_shows_an_old_folder_too(tmp_path: Path) -> None:
    """The server draws a restored party into a later attempt first, and has the earlier one certified only then."""
    federation = Federation(tmp_path, 4)
    everyone = tuple(range(4))

    def ask(party: int, request: wire.Request) -> Any:
        (answer,) = federation.ask(party, request)
        return answer

    def shares(attempt: int) -> list[dict[int, bytes]]:
        adverts = tuple(ask(party, Invitation(federation.terms.canonical, attempt)) for party in everyone)
        return [dict(ask(party, KeyList(attempt, adverts)).shares) for party in everyone]

    def task(party: int, attempt: int, round: int, sealed: list[dict[int, bytes]], *history: Certificate) -> Any:
        own = tuple((other, sealed[other][party]) for other in everyone if other != party)
        return ask(party, Task(attempt, round, b"x", everyone, own, history))

    shutil.copytree(tmp_path / f"party-{VICTIM}", tmp_path / "backup")
    sealed = shares(0)
    assert all(isinstance(task(party, 0, 0, sealed), MaskedVector) for party in everyone)
    federation.parties[VICTIM].close()
    shutil.rmtree(tmp_path / f"party-{VICTIM}")
    (tmp_path / "backup").rename(tmp_path / f"party-{VICTIM}")
    federation.parties[VICTIM] = federation.open(VICTIM)
    assert isinstance(task(VICTIM, 1, 0, shares(1)), MaskedVector)
    statement = statement_of(federation.terms.digest, 0, 0, b"x", everyone, Position())
    shown = named(federation, replace(statement, survivors=everyone))
    signed = tuple((party, ask(party, shown).signature) for party in everyone if party != VICTIM)
    answer = task(VICTIM, 2, 1, shares(2), Certificate(shown.statement, signed))
    assert isinstance(answer, Refusal)
    assert answer.reason == "restored"


@pytest.mark.parametrize("stage", list(Stage)[2:])
def test_a_restarted_party_does_not_answer_for_earlier_attempts(tmp_path: Path, stage: Stage) -> None:
    federation = at(tmp_path, stage)
    federation.restart(VICTIM)
    request = federation.request(VICTIM)[0]
    assert reason(federation.ask(VICTIM, request)) == "forgotten"
    assert reason(federation.ask(VICTIM, Invitation(federation.terms.canonical, 0))) == "late"
    while federation.server.sum is None:
        federation.stage()
    federation.check(federation.server.sum)


def test_a_forked_process_does_not_answer(tmp_path: Path) -> None:
    """A fork has the same secrets and could mask another vector with them."""
    federation = at(tmp_path, Stage.VECTORS)
    request, (reads, writes) = federation.server.request(VICTIM), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, federation.parties[VICTIM].answer(request))
        os._exit(0)
    os.waitpid(child, 0)
    assert reason(decode_answers(os.read(reads, 4096))) == "failed"
    assert federation.ledgers[VICTIM].paid == []
    assert isinstance(decode_answers(federation.parties[VICTIM].answer(request))[0], MaskedVector)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    with pytest.raises(RuntimeError, match="in use by another process"):
        federation.open(VICTIM)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4)
    federation.parties[0].close()
    federation.server.close()
    other = dataclasses.replace(federation.terms, sigma=2.0)
    with pytest.raises(ValueError, match="other terms"):
        Party(tmp_path / "party-0", federation.keys[0], federation.roster, other, federation.ledgers[0])
    with pytest.raises(ValueError, match="other terms"):
        Server(tmp_path / "server", federation.roster, other)


# ---- parties that misbehave -----------------------------------------------------------------------------------------


def reported(federation: Federation, party: int) -> str:
    return " | ".join(report.what for report in federation.server.reports if report.party == party)


@pytest.mark.parametrize("data", [b"", b"\xff" * 50, b"\x91" * 5000, encode((Refusal(0, "because"),)), bytes(10)])
def test_garbage_of_a_party_is_named_and_ignored(tmp_path: Path, data: bytes) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    federation.server.receive(3, data)
    assert "cannot be read" in reported(federation, 3)
    while federation.server.sum is None:
        federation.stage()
    federation.check(federation.server.sum)


def test_keys_for_another_party_are_named_and_ignored(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 5)
    federation.server.start(0, b"x")
    (advert,) = decode_answers(federation.parties[2].answer(federation.server.request(2)))
    federation.server.receive(3, encode((advert,)))
    assert "keys for another party" in reported(federation, 3)
    federation.server.receive(2, encode((replace(advert, count=1),)))
    assert "not signed" in reported(federation, 2)
    bad = replace(advert, mask_key=bytes(32))
    bad = replace(bad, signature=federation.keys[2].sign("advert", bad.signed_bytes))
    federation.server.receive(2, encode((bad,)))
    assert "lead to no secret" in reported(federation, 2)
    federation.check(federation.sum(0))


def test_a_vector_of_another_size_is_named_and_ignored(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    federation.server.receive(3, encode((MaskedVector(0, bytes(4)),)))
    assert "4 bytes, not 20" in reported(federation, 3)
    federation.server.receive(3, encode((MaskedVector(0, bytes(20), bytes(2**17)),)))
    assert "deposits 131072 bytes" in reported(federation, 3)
    federation.server.receive(3, encode((MaskedVector(0, bytes(20)),)))
    assert "without a receipt" in reported(federation, 3)
    made_for = statement_of(federation.terms.digest, 0, 0, b"x", (0, 1, 2, 3, 4), Position())
    receipt = federation.keys[3].sign(RECEIPT, receipt_content(made_for))
    federation.server.receive(3, encode((MaskedVector(0, bytes(20), receipt=receipt),)))
    federation.server.receive(3, encode((MaskedVector(0, bytes(19) + b"\1"),)))
    assert "two different vectors" in reported(federation, 3)


def test_late_answers_are_named_and_ignored(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.VECTORS)
    late = federation.parties[3].answer(federation.server.request(3))
    federation.stage(lambda party, _: party != 3)
    federation.server.receive(3, late)
    assert "late vector" in reported(federation, 3)
    while federation.server.sum is None:
        federation.stage()
    federation.check(federation.server.sum)
    assert 3 not in federation.server.sum.survivors
    federation.server.start(1, b"x")
    federation.server.receive(3, late)
    assert "late MaskedVector of attempt 0" in reported(federation, 3)


def test_a_party_that_signs_another_list_is_named(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SIGNATURES)
    federation.server.receive(3, encode((Endorsement(0, bytes(64)),)))
    assert "signed another list" in reported(federation, 3)


def test_incomplete_shares_are_named_and_ignored(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SHARES)
    (dealt,) = decode_answers(federation.parties[3].answer(federation.server.request(3)))
    federation.server.receive(3, encode((replace(dealt, shares=dealt.shares[:-1]),)))
    assert "one share for each other party" in reported(federation, 3)


def with_false_shares(reveal: Reveal, owners: set[int]) -> Reveal:
    changed = {
        name: tuple((owner, bytes(16) if owner in owners else share) for owner, share in getattr(reveal, name))
        for name in ("self_shares", "key_shares")
    }
    return replace(reveal, **changed)


def test_false_shares_are_named_and_the_sum_is_right(tmp_path: Path) -> None:
    """Party 8 drops out before its vector, and party 7 reveals late; party 0 reveals false shares of both."""
    federation = Federation(tmp_path, 9)
    federation.until(Stage.VECTORS)
    federation.stage(lambda party, _: party != 8)
    federation.stage()
    for party in range(7):
        (reveal, *_) = decode_answers(federation.parties[party].answer(federation.server.request(party)))
        assert isinstance(reveal, Reveal)
        federation.server.receive(party, encode((with_false_shares(reveal, {7, 8}) if party == 0 else reveal,)))
    with pytest.raises(AttemptFailed):
        federation.server.advance()  # 7 shares, of which one is false, and all 7 are needed
    assert federation.server.sum is None
    federation.exchange(7)
    federation.server.advance()
    assert federation.server.sum is not None
    federation.check(federation.server.sum)
    assert "false share of party 8" in reported(federation, 0)


@pytest.mark.slow
def test_a_party_that_reveals_false_shares_makes_one_search_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parties are silent in both rounds, and party 6 reveals false shares of them: it is doubted from then on."""
    tried: list[set[int]] = []

    def noted(found: dict[int, bytes]) -> bytes:
        tried.append(set(found))
        return combine(found)

    monkeypatch.setattr("normec.federation.secure_sum.shares.combine", noted)
    federation = Federation(tmp_path, 10)
    for round in range(2):
        federation.server.start(round, b"x")
        while federation.server.stage < Stage.REVEALS:
            vectors = federation.server.stage is Stage.VECTORS
            federation.stage(lambda party, _, vectors=vectors: party < 8 or not vectors)
        for party in range(8):
            (reveal, *_) = decode_answers(federation.parties[party].answer(federation.server.request(party)))
            federation.server.receive(party, encode((with_false_shares(reveal, {8, 9}) if party == 6 else reveal,)))
        federation.server.advance()
        assert federation.server.sum is not None
        federation.check(federation.server.sum)
    assert 6 in tried[0], "the first search begins with the false share"
    assert [6 in parties for parties in tried[-3:]] == [False] * 3, "the other silent party, and both in the next round"
    assert "false share of party 8" in reported(federation, 6)


def test_a_false_seed_is_named_and_shares_take_its_place(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.REVEALS, 7)
    for party in range(7):
        (reveal, *_) = decode_answers(federation.parties[party].answer(federation.server.request(party)))
        federation.server.receive(party, encode((replace(reveal, seed=bytes(16)) if party == 2 else reveal,)))
    federation.server.advance()
    assert federation.server.sum is not None
    federation.check(federation.server.sum)
    assert "another seed than it committed to" in reported(federation, 2)


def test_shares_that_cannot_be_decrypted_are_named_and_do_not_stop_the_sum(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SHARES, 7)
    (dealt,) = decode_answers(federation.parties[3].answer(federation.server.request(3)))
    assert isinstance(dealt, SealedShares)
    broken = tuple((party, bytes(48) if party == 5 else share) for party, share in dealt.shares)
    federation.server.receive(3, encode((replace(dealt, shares=broken),)))
    while federation.server.sum is None:
        federation.stage()
    federation.check(federation.server.sum)
    assert "shares of party 3 cannot be decrypted" in reported(federation, 5)


def test_a_party_that_deals_false_shares_and_disappears_stops_the_attempt(tmp_path: Path) -> None:
    federation = at(tmp_path, Stage.SHARES, 5)
    attempt = federation.parties[3]._attempts[0]
    attempt.key_seed = bytes(16)  # shares of another seed than the one of its key
    made = federation.server
    federation.stage()
    federation.stage(lambda party, _: party != 3)
    federation.stage()
    with pytest.raises(AttemptFailed):
        federation.stage()
    assert "dealt shares that do not fit" in reported(federation, 3)
    assert made.sum is None
    federation.check(federation.sum(0, reaches=lambda party, _: party != 3))


# ---- bytes ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_no_bytes_end_in_an_unexpected_error(data: bytes) -> None:
    for decode in (wire.decode_requests, wire.decode_answers):
        try:
            decode(data)
        except Refused as refused:
            if refused.reason != "malformed":
                raise


@pytest.mark.parametrize(
    "message",
    [
        Invitation(b"", -1),
        Invitation(b"", 2**31),
        Invitation(bytes(2**16 + 1), 0),
        Task(0, 2**20, b"", (), ()),
        Task(0, 0, b"", (200,), ()),
        Task(0, 0, b"", (0,) * 201, ()),
        Task(0, 0, b"", (), ((0, bytes(47)),)),
        Task(0, 0, b"", (), ((0, bytes(49)),)),
        KeyList(0, (Advert(0, 0, bytes(31), bytes(32), bytes(32), bytes(32), 0, 0),)),
    ],
)
def test_values_outside_their_limits_are_refused(message: wire.Request) -> None:
    with pytest.raises(Refused, match="malformed"):
        wire.decode_requests(encode((message,)))


def test_an_exchange_has_one_or_two_parts_of_the_right_kind() -> None:
    one = Invitation(b"", 0)
    assert wire.decode_requests(encode((one, one))) == (one, one)
    for parts in ((), (one, one, one), (Refusal(0, "late"),)):
        with pytest.raises(Refused, match="malformed"):
            wire.decode_requests(encode(parts))
