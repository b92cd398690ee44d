"""The catalogue of methods: what is in it can be built, and the page about methods lists it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from normec import Privacy
from normec.algorithms.catalogue import CATALOGUE, PRIVATE_METHODS, installed, is_own
from normec.experiments import methods
from normec.privacy.facts import Refused, Setting
from normec.privacy.mechanism import facts_of
from normec.privacy.rules import release
from normec.settings import make

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "methods.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def listed() -> dict[str, dict[str, str]]:
    """The rows of the page's table by the names of the methods, with the cells by their headers."""
    found = re.search(r"(?m)^\| name \|.+\n(\|.+\|\n)+", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    header, _, *rows = found[0].splitlines()
    table = [dict(zip(cells(header), cells(row), strict=True)) for row in rows]
    return {row["name"].strip("`"): row for row in table}


def test_the_page_lists_every_method() -> None:
    assert listed().keys() == CATALOGUE.keys()
    assert all(row["when to use"] for row in listed().values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_page_lists_the_settings_and_bounds(name: str) -> None:
    bound, settings = listed()[name]["bound"], listed()[name]["settings"]
    assert [one for one in settings.split(", ") if one] == list(CATALOGUE[name].settings)
    built = methods.build(make({"method": name, "private": False}), dim=20)
    assert (bound == "none") == math.isinf(built.bound)
    assert (bound != "none") == (name in PRIVATE_METHODS)
    if bound == "1":
        assert built.bound == 1
    elif bound == "τ":
        assert built.bound == CATALOGUE[name].settings["tau"]


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_page_states_the_privacy_rules(name: str) -> None:
    """They are those by which the noise of a run is found, or the run is refused."""
    built = methods.build(make({"method": name, "private": False}), dim=20)
    facts = facts_of(built, 20)
    run = Setting(clients=5, rounds=2, records=1000, dimension=20, local_steps=CATALOGUE[name].local is not None)

    def allowed(**terms: Any) -> bool:
        try:
            release(facts, Privacy(epsilon=1, trust="local", **terms), run)
        except Refused:
            return False
        return True

    rules = listed()[name]["privacy rules"]
    assert ("client" in rules) == allowed(unit="client")
    assert ("record" in rules) == allowed(unit="record", record_clip="auto")
    assert ("clip C" in rules) == ("record" in rules and math.isfinite(facts.lipschitz))


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
