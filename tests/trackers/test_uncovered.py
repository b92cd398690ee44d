"""Trackers of a private run: nothing without noise by default; where it was asked for, under a name that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from normec.storage.history import NOT_COVERED, UNNOISED
from normec.trackers import TensorBoard, Tracker

from .test_trackers import close, events, expected, train


class Kept(Tracker):
    """Keeps what any tracker is given."""

    def start(self, first_round: int) -> None:  # noqa: ARG002
        self.names: set[str] = set()

    def log(self, values: dict[str, float], round: int) -> None:  # noqa: ARG002
        self.names |= values.keys()

    def finish(self, status: str, error: str | None) -> None:  # noqa: ARG002
        self.error = error


class Fails(Kept):
    """Ends the run after its first round, as a record that a model cannot take would."""

    def round(self, round: int) -> None:  # noqa: ARG002
        raise KeyError("Jane Doe")


def test_a_private_run_sends_only_what_the_guarantee_covers(tmp_path: Path) -> None:
    kept = Kept()
    train(tmp_path / "run", [kept])
    assert kept.names == {"messages", "bytes", "epsilon", "accuracy", "test_loss"}


def test_what_is_not_covered_has_a_name_that_says_so(tmp_path: Path) -> None:
    train(tmp_path / "run", [TensorBoard(tmp_path / "tb")], diagnostics=True)
    wanted = expected(tmp_path / "run")
    assert set(UNNOISED) <= set(wanted)
    close(
        events(tmp_path / "tb"),
        {f"{NOT_COVERED}/{name}" if name in UNNOISED else name: points for name, points in wanted.items()},
    )


def test_a_run_without_privacy_keeps_its_names(tmp_path: Path) -> None:
    kept = Kept()
    train(tmp_path / "run", [kept], private=False)
    assert set(UNNOISED) <= kept.names


@pytest.mark.parametrize(("private", "sent"), [(True, "KeyError"), (False, "'Jane Doe'")])
def test_a_tracker_gets_the_kind_of_an_error_that_ends_a_private_run_and_not_its_text(
    tmp_path: Path, private: bool, sent: str
) -> None:
    fails = Fails()
    with pytest.raises(KeyError):
        train(tmp_path / "run", [fails], private=private)
    assert fails.error == sent
