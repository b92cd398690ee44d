"""Which parties are online as the SuperLink says, and a SuperLink that no longer answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normec import UsageError
from normec.federation.flower.run_parties import FILE, SILENCE, RunParties, gather, name_of

httpx = pytest.importorskip("httpx")


class Link:
    """A Grid that lists its nodes, or fails."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.error: Exception | None = None

    def get_nodes(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.nodes


def node(number: int) -> Any:
    return SimpleNamespace(node_id=number, public_key=b"%d" % number, registered_at=number, last_activated_at="now")


def test_parties_are_known_by_their_keys_in_the_order_of_registration(tmp_path: Path) -> None:
    link = Link()
    link.nodes = [node(3), node(1), node(2)]
    parties = gather(link, tmp_path, 2, 1.0, print)  # type: ignore[arg-type]
    assert parties.names == [name_of(b"1"), name_of(b"2")]
    assert parties.online().keys() == set(parties.names)
    assert parties.name(1) == name_of(b"1")
    assert parties.name(3) == "?"
    assert gather(link, tmp_path, 2, 1.0, print).names == parties.names  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has 2 parties, got parties = 3"):
        gather(link, tmp_path, 3, 1.0, print)  # type: ignore[arg-type]


def test_too_few_parties_are_counted_and_the_wait_ends(tmp_path: Path) -> None:
    link, said = Link(), list[str]()
    link.nodes = [node(1)]
    with pytest.raises(UsageError, match="only 1 of 2 parties came online within 0 s"):
        gather(link, tmp_path, 2, 0.0, said.append)  # type: ignore[arg-type]
    assert said == ["1 of 2 parties are online"]
    assert not (tmp_path / FILE).exists()


def test_a_silent_superlink_is_given_up_only_after_a_while() -> None:
    link = Link()
    link.nodes = [node(1)]
    parties = RunParties(link, [name_of(b"1")])  # type: ignore[arg-type]
    before = parties.online()
    link.error = httpx.ConnectError("refused")
    assert parties.online() == before
    parties._answered -= SILENCE + 1
    with pytest.raises(UsageError, match="has not answered for 300 s"):
        parties.online()


def test_at_the_start_a_silent_superlink_is_one_line(tmp_path: Path) -> None:
    link = Link()
    link.error = httpx.ConnectError("refused")
    with pytest.raises(UsageError, match="has not answered"):
        gather(link, tmp_path, 1, 1.0, print)  # type: ignore[arg-type]


def test_a_run_that_was_stopped_says_so() -> None:
    stopped = pytest.importorskip("flwr.supercore.run").RunNotRunningException
    link = Link()
    link.error = stopped()
    with pytest.raises(UsageError, match="stopped at the SuperLink"):
        RunParties(link, []).online()  # type: ignore[arg-type]
