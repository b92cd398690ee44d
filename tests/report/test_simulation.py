"""Seeded noise is called a simulation wherever a private run is shown; real noise is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from normec.errors import UsageError
from normec.experiments import runs
from normec.report import page
from normec.report.listing import Listing
from normec.report.run_view import SIMULATION, read_run
from normec.settings import make

from ..cli.command import normec
from .conftest import SMALL
from .test_pages import read

BADGE = 'class="badge"'


@pytest.mark.parametrize("name", ["private", "diagnosed", "comparison", "sweep"])
def test_pages_of_seeded_runs_carry_the_badge(name: str, library: Path) -> None:
    text = (library / name / "report.html").read_text()
    assert text.count(BADGE) == 1
    assert SIMULATION in text


@pytest.mark.parametrize("name", ["plain", "diverged"])
def test_pages_without_privacy_carry_none(name: str, library: Path) -> None:
    assert BADGE not in (library / name / "report.html").read_text()


def test_real_noise_is_no_simulation(tmp_path: Path) -> None:
    runs.execute(make({**SMALL, "rounds": 2, "noise": "secure"}), tmp_path / "run")
    found = read(tmp_path / "run" / "report.html")
    assert SIMULATION not in found.text
    assert "with (8, 1e-5)-differential privacy" in found.text
    assert not Listing(tmp_path).changes(None)["changed"][0]["simulation"]


def test_the_headline_of_every_kind_of_page_says_it(library: Path, tmp_path: Path) -> None:
    many = page.write_many([library / "private", library / "diagnosed"], tmp_path / "many.html")
    for path in (library / "private" / "report.html", library / "sweep" / "report.html", many):
        headline = path.read_text().partition("<h1")[2].partition("</h1>")[0]
        assert "in a simulation of (" in headline


def test_a_summary_that_hides_it_has_no_page(copied: Path) -> None:
    path = copied / "private" / "summary.json"
    summary = json.loads(path.read_text())
    summary["privacy"]["simulation"] = False
    path.write_text(json.dumps(summary))
    assert read_run(copied / "private").epsilon is None
    with pytest.raises(UsageError, match=r"ledger\.jsonl is that of a simulation, and summary\.json says otherwise"):
        page.write_run(copied / "private")


def test_a_run_that_has_no_summary_yet_is_known_by_its_settings(copied: Path) -> None:
    (copied / "private" / "summary.json").unlink()
    assert read_run(copied / "private").simulation
    (copied / "private" / "config.toml").unlink()
    assert read_run(copied / "private").simulation  # from the checkpoint


def test_settings_that_hide_it_are_not_believed(copied: Path) -> None:
    """A folder without summary and checkpoint has nothing but its settings and its ledger."""
    folder = copied / "private"
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoint")
    kept = [line for line in (folder / "config.toml").read_text().splitlines() if '"noise"' not in line]
    (folder / "config.toml").write_text("\n".join(kept))
    assert read_run(folder).simulation
    (folder / "config.toml").write_text("\n".join([*kept, '"noise" = "secure"']))
    with pytest.raises(UsageError, match="noise = 'seeded', and the settings say 'secure'"):
        page.write_run(folder)


def test_some_of_several_runs(library: Path, tmp_path: Path) -> None:
    runs.execute(make({**SMALL, "rounds": 2, "noise": "secure"}), tmp_path / "real")
    text = read(page.write_many([library / "private", tmp_path / "real"], tmp_path / "many.html")).text
    assert f"{SIMULATION} (1 of 2 private runs)" in text


@pytest.mark.slow
def test_the_list_and_the_terminal_say_it(library: Path, copied: Path) -> None:
    entries = {entry["path"]: entry for entry in Listing(library).changes(None)["changed"]}
    assert entries["private"]["simulation"]
    assert not entries["plain"]["simulation"]
    shown = normec("train", "private/config.toml", "--out", "private", "--quiet", cwd=copied)
    assert shown.returncode == 0, shown.stderr
    assert f"{SIMULATION}." in shown.stdout
