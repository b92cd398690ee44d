"""Optimizers look for models that are wrapped in DDP among all objects; tests of other things have fewer to look at."""

from __future__ import annotations

import gc

import pytest

from normec.distributed import flat_parameters


@pytest.fixture
def new_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizers search the objects of this test alone: those of all modules of tests were frozen before.

    A process that has loaded all tests holds millions of objects, and a search of them takes a tenth of a second.
    """
    monkeypatch.setattr(flat_parameters, "_all_objects", gc.get_objects)
