"""Tests of federations do not wait for the disk: a kill loses what a process holds, not what the system has taken."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def flushed(handle: int) -> None:
        pass

    monkeypatch.setattr(os, "fsync", flushed)
