"""What a rank says about the others after a collective call has failed."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from normec.distributed import rank_status
from normec.distributed.rank_status import RankStatus

LOST = RuntimeError("Connection closed by peer")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankStatus]:
    """Three ranks that do not wait for one another's messages."""
    monkeypatch.setattr(rank_status, "_GRACE", 0.0)
    store = HashStore()
    return [RankStatus(store, rank, 3, 60.0) for rank in range(3)]


def test_a_rank_that_was_killed_is_named_once_all_others_have_noticed(ranks: list[RankStatus]) -> None:
    ranks[0].diagnose(LOST)
    assert str(ranks[1].diagnose(LOST)) == "rank 2 ended without a message; it was killed, or it crashed"


def test_a_rank_that_has_not_noticed_yet_is_not_said_to_be_killed(ranks: list[RankStatus]) -> None:
    said = str(ranks[0].diagnose(LOST))
    assert said == "at least one of ranks 1, 2 was killed, or crashed; the others may still be at work"


def test_a_rank_that_has_said_why_it_ends_is_quoted(ranks: list[RankStatus]) -> None:
    ranks[2].record_exit("UsageError")
    assert str(ranks[0].diagnose(LOST)) == "rank 2 ended: UsageError"
