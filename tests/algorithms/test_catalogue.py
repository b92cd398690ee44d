"""The catalogue of methods: what is in it can be built, and the page about methods lists it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from normec.algorithms.catalogue import CATALOGUE, PRIVATE_METHODS
from normec.experiments import methods
from normec.settings import make

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "methods.md"


def listed() -> dict[str, list[str]]:
    """The names and bounds and settings in the page's table."""
    rows = re.findall(r"(?m)^\| `([a-z0-9-]+)` \|(.+)\|$", PAGE.read_text(encoding="utf-8"))
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}


def test_the_page_lists_every_method() -> None:
    assert listed().keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_page_lists_the_settings_and_bounds(name: str) -> None:
    *_, bound, settings = listed()[name]
    assert [one for one in settings.rstrip(" |").split(", ") if one] == list(CATALOGUE[name].settings)
    built = methods.build(make({"method": name, "private": False}), dim=20)
    assert (bound == "none") == math.isinf(built.bound)
    assert (bound != "none") == (name in PRIVATE_METHODS)
    if bound == "1":
        assert built.bound == 1
    elif bound == "τ":
        assert built.bound == CATALOGUE[name].settings["tau"]
