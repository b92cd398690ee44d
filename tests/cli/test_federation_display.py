"""What a federation on this machine shows while it runs."""

from __future__ import annotations

import io
import sys

import pytest

from normec.cli.federation_display import LiveTable, PartyLines, federation_display, show_parties
from normec.federation.local.federation import PartyStatus

SPENT = {"epsilon": 0.25, "budget": 2.0, "unit": "record", "delta": 1e-4, "releases": 7, "without_noise": 0}
STATUSES = [PartyStatus("Cleveland", "online", SPENT), PartyStatus("Budapest", "starting", None)]


def test_changes_are_printed_once_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = federation_display(quiet=False)
    assert isinstance(display, PartyLines)
    display.begin(0, 3)
    display.parties(STATUSES)
    display.parties(STATUSES)
    display.parties([STATUSES[0], PartyStatus("Budapest", "online", None)])
    display.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" after")[0] for line in lines] == [
        "Cleveland is online",
        "Budapest is starting",
        "Budapest is online",
    ]


def test_a_terminal_shows_who_is_there_and_what_each_has_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    display = federation_display(quiet=False)
    assert isinstance(display, LiveTable)
    display.begin(0, 30)
    display.parties(STATUSES)
    display.round(4)
    display.row({"round": 4, "epsilon": 0.25, "accuracy": 0.8})
    display.close()
    text = shown.getvalue()
    for word in ("round 4 of 30", "accuracy 80.0 %", "Cleveland", "Budapest", "0.25", "each record"):
        assert word in text


def test_nothing_is_shown_if_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    display = federation_display(quiet=True)
    display.begin(0, 3)
    display.parties(STATUSES)
    assert capsys.readouterr().err == ""
    assert display.statuses == STATUSES
    show_parties(display.statuses)
    printed = capsys.readouterr().out
    assert "Cleveland" in printed
    assert "0.25" in printed
