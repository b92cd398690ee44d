"""The catalogue of methods: what is in it can be built, and the page about methods lists it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from normec.algorithms.catalogue import CATALOGUE, PRIVATE_METHODS, installed, is_own
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


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What installed packages offer is read once, and again when a folder of packages, or their list, has changed."""
    monkeypatch.syspath_prepend(tmp_path)
    before = installed()
    assert not is_own("meanwhile")
    facts = tmp_path / "some-1.0.dist-info"
    facts.mkdir()
    (facts / "entry_points.txt").write_text("[normec.methods]\nmeanwhile = some:Method\n")
    assert is_own("meanwhile")
    assert installed().keys() - before.keys() == {"meanwhile"}
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    assert not is_own("meanwhile")
