"""What pages show of a private run: nothing without noise by default; where it was asked for, a mark beside it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from normec.experiments import compare, runs
from normec.report import charts, page, run_page
from normec.report.listing import Listing
from normec.report.run_view import read_run
from normec.settings import make
from normec.storage.history import NOT_COVERED, UNNOISED
from normec.training.callbacks import Callback
from normec.training.summary import write_summary

from .conftest import SMALL, run
from .test_pages import read

SHOWN = ("Training loss", "Gradient norm", "Memory error", "Message norm", "Client disagreement", "Client by client")


def held(folder: Path) -> str:
    """Every readable file that a private run leaves, but for its checkpoint, which the statement names."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != "report.html")
    return "\n".join(path.read_bytes().decode(errors="replace") for path in files)


def test_a_private_run_leaves_nothing_without_noise(library: Path) -> None:
    folder = library / "private"
    assert not (folder / "clients.json").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert not set(UNNOISED) & set(summary["final"])
    assert summary["smallest_grad_norm"] is None
    assert summary["not_covered"] == []
    found = read(folder / "report.html")
    assert not set(UNNOISED) & set(json.loads(found.data)["series"][0]["columns"])
    for name in SHOWN:
        assert name not in found.text
    identity = json.loads((folder / "checkpoint" / "latest.json").read_text())["identity"]
    assert identity["data"] not in found.text  # a checksum tells whoever guesses the records that he is right
    assert "value at the start" not in found.text
    assert identity["data"] not in held(folder)


def test_what_was_asked_for_is_marked_where_it_stands(library: Path) -> None:
    folder = library / "diagnosed"
    found = read(folder / "report.html")
    for name in SHOWN:
        assert name in found.text
    drawn = {chart["key"]: chart for chart in json.loads(found.data)["charts"]}
    for key in ("loss", "grad_norm", "memory_error", "message_norm", "disagreement"):
        assert NOT_COVERED in drawn[key]["explained"]
    for key in ("accuracy", "epsilon"):
        assert NOT_COVERED not in drawn[key]["explained"]
    cards = {name: word for name, _, word in run_page.card_facts(read_run(folder))}
    assert cards["Training loss"] == cards["Gradient norm"] == NOT_COVERED
    assert json.loads((folder / "clients.json").read_text())["note"] == NOT_COVERED
    assert json.loads((folder / "summary.json").read_text())["not_covered"] == list(UNNOISED)
    assert "recorded the clients' losses" in found.text


def test_only_the_owner_can_read_what_no_noise_covers(copied: Path, tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        for name, mode in (("diagnosed", 0o600), ("private", 0o644), ("plain", 0o644)):
            folder = copied / name
            write_summary(folder, json.loads((folder / "summary.json").read_text()))
            page.write_many([folder], tmp_path / f"{name}.html")
            for path in (folder / "summary.json", folder / "report.html", tmp_path / f"{name}.html"):
                assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(umask)


def test_pages_of_several_runs_mark_it_too(library: Path, tmp_path: Path) -> None:
    for text in (
        read(library / "comparison" / "report.html").text,
        read(library / "sweep" / "report.html").text,
        read(page.write_many([library / "diagnosed", library / "plain"], tmp_path / "many.html")).text,
    ):
        assert f"they are {NOT_COVERED}" in text
        assert f"loss ({NOT_COVERED})" in text
    alone = read(page.write_many([library / "private", library / "plain"], tmp_path / "other.html")).text
    assert NOT_COVERED not in alone


def test_a_run_without_privacy_has_no_such_marks(library: Path) -> None:
    found = read(library / "plain" / "report.html")
    assert NOT_COVERED not in found.text
    assert "Client by client" in found.text


def test_folders_of_older_versions_are_marked(copied: Path) -> None:
    """They hold un-noised columns, and know no setting called diagnostics."""
    folder = copied / "diagnosed"
    lines = (folder / "config.toml").read_text().splitlines()
    (folder / "config.toml").write_text("\n".join(line for line in lines if "diagnostics" not in line) + "\n")
    assert NOT_COVERED in read(page.write_run(folder)).text


def test_the_list_shows_no_loss_of_a_private_run(library: Path) -> None:
    entries = {entry["path"]: entry for entry in Listing(library).changes(None)["changed"]}
    assert entries["plain"]["loss"] is not None
    for name in ("private", "diagnosed"):
        assert entries[name]["loss"] is None
        assert entries[name]["spark"]["column"] == "accuracy"


def test_several_runs_are_drawn_by_the_same_column(library: Path) -> None:
    """A private run has no training loss; its test loss does not stand beside the training loss of others."""
    views = [read_run(library / name) for name in ("private", "plain")]
    drawn = {one.key: one for one in charts.compared(list(charts.ALL.values()), [view.history for view in views])}
    assert list(drawn["loss"].columns) == ["test_loss"]
    assert drawn["loss"].title == "Loss, test"


@pytest.mark.slow
def test_a_comparison_without_diagnostics_has_a_page(tmp_path: Path) -> None:
    entries = compare.candidates(["normec", "dpsgd-norm"], SMALL)
    compare.write(compare.run(entries, tmp_path, lambda _: Callback()), tmp_path)
    found = read(tmp_path / "report.html")
    assert "reached the highest test accuracy" in found.text
    assert NOT_COVERED not in found.text
    assert "Step sizes tried" not in found.text


def test_a_sweep_that_recorded_nothing_to_choose_by_says_so(tmp_path: Path) -> None:
    for lr in (0.05, 0.5):
        run(tmp_path / "cells" / f"lr-{lr}", lr=lr)
    (tmp_path / "sweep.toml").write_text("[grid]\nlr = [0.05, 0.5]\n")
    text = read(page.write(tmp_path)).text
    assert "2 of 2 cells have come to an end; nothing that may choose between them was recorded" in text


def test_validation_records_are_said_to_be_unprotected(tmp_path: Path) -> None:
    result = runs.execute(make({**SMALL, "validation": 0.2}), tmp_path / "run")
    assert runs.HELD_OUT in result.summary["privacy"]["notes"]
    assert "validation_accuracy" in result.summary["final"]
    assert "held out of the training records" in read(tmp_path / "run" / "report.html").text
