"""Parties and server that are killed before or after every durable write, and continue from their folders.

What must hold whatever happens: every vector enters at most one opened sum, no vector was made without a payment, sums
are right, a party is told the truth about each vector, and the run comes to its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from normec.federation.secure_sum.server import AttemptFailed, Stage

from ..faulty_network import Killed, dying
from .parties import Federation

ROUNDS = 3


def exchange(federation: Federation, party: int) -> None:
    """One exchange in which the party or the server may be killed; who dies comes back from its folder."""
    request = federation.server.request(party)
    try:
        answer = federation.parties[party].answer(request)
    except Killed:
        federation.restart(party)
        return
    federation.server.receive(party, answer)


def complete(federation: Federation, round: int) -> None:
    """Sum a round, with as many attempts as it takes."""
    attempts = 0
    while federation.server.sum is None or federation.server.sum.round < round:
        try:
            if federation.server.stage is Stage.IDLE or federation.server.sum is not None:
                attempts += 1
                assert attempts < 5, "the round does not come to its end"
                federation.server.start(round, b"x")
            for party in federation.server.addressees:
                exchange(federation, party)
            federation.server.advance()
        except Killed:
            federation.restart_server()
        except AttemptFailed:
            if federation.server.stage is Stage.REVEALS:  # the secrets of a restarted party are gone
                federation.server.start(round, b"x")
    federation.opened.append(federation.server.sum)


def killed_at(folder: Path, point: int) -> Federation:
    """A run in which one process dies at a point."""
    federation = Federation(folder, 4, deposits=True)
    with dying(point):
        for round in range(ROUNDS):
            complete(federation, round)
    return federation


def check(federation: Federation) -> None:
    attempts = [made.attempt for made in federation.opened]
    assert [made.round for made in federation.opened] == list(range(ROUNDS))
    assert len(set(attempts)) == len(attempts)
    for made in federation.opened:
        federation.check(made)
    for number, ledger in enumerate(federation.ledgers):
        assert set(ledger.made) <= set(ledger.paid)
        assert len(ledger.paid) == len(set(ledger.paid)), "an attempt was paid for twice"
        entered = [made.attempt for made in federation.opened if number in made.survivors]
        for attempt, counted in ledger.counted.items():
            assert counted == (attempt in entered), f"party {number} was told wrongly about attempt {attempt}"
        assert set(entered[:-1]) <= set(ledger.counted)


def writes(folder: Path, rounds: int) -> int:
    """How many durable writes the first rounds of the run have without a kill."""
    count, found = 0, 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            return real(*given, **more)

        return call

    federation = Federation(folder, 4, deposits=True)
    with ExitStack() as stack:
        for name in ("write", "fsync", "replace"):
            stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        for round in range(ROUNDS):
            complete(federation, round)
            found = count if round < rounds else found
    check(federation)
    return found


@pytest.mark.parametrize("point", [40, 151, 262])
def test_a_kill_at_some_writes_keeps_every_promise(tmp_path: Path, point: int) -> None:
    check(killed_at(tmp_path, point))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_kill_at_every_write_keeps_every_promise(tmp_path: Path, part: int) -> None:
    """In the first round and in the second; the third is like the second, and shows that the run goes on."""
    total = 2 * writes(tmp_path / "whole", rounds=2)
    assert total > 151
    for point in range(part, total, 4):
        check(killed_at(tmp_path / str(point), point))
