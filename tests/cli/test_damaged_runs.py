"""Run folders that were edited, cut or emptied by hand: each command says so in one line, and shows no ε."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

import normec
from normec.cli.app import run as command
from normec.errors import UsageError

from ..support.runs import snapshot

WORDS = ["--rounds", "3", "--clients", "5", "--quiet"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run that is done."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert command(["train", *WORDS, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / "run"))


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        held = json.loads((folder / name).read_text())
        change(held)
        (folder / name).write_text(json.dumps(held))

    return damage


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return damage


def emptied(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"") and None


def removed(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def made_a_folder(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def shortened(folder: Path) -> None:
    """The last release is cut off, and the head is made to agree."""
    path = folder / "ledger.jsonl"
    kept = path.read_text().splitlines()[:-1]
    path.write_text("\n".join(kept) + "\n")
    head = {"hash": json.loads(kept[-1])["hash"], "lines": len(kept)}
    (folder / "ledger.jsonl.head").write_text(json.dumps(head) + "\n")


SPENT = {
    "ledger removed": removed("ledger.jsonl"),
    "ledger and head removed": removed("ledger.jsonl", "ledger.jsonl.head"),
    "head removed": removed("ledger.jsonl.head"),
    "ledger emptied": emptied("ledger.jsonl"),
    "a line changed": replaced("ledger.jsonl", '"sigma":', '"sigma":1'),
    "a release cut off": shortened,
    "ledger a folder": made_a_folder("ledger.jsonl"),
    "a smaller epsilon in the summary": edited("summary.json", lambda held: held["privacy"].update(epsilon=1.0)),
    "fewer releases in the summary": edited("summary.json", lambda held: held["privacy"].update(releases=2)),
    "no simulation in the summary": edited("summary.json", lambda held: held["privacy"].update(simulation=False)),
    "another delta in the summary": edited("summary.json", lambda held: held["privacy"].update(delta=1e-9)),
    "no privacy in the summary": edited("summary.json", lambda held: held.update(privacy=None)),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Exit code 2, one line on stderr, nothing of a result."""
    capsys.readouterr()
    code = command(list(arguments))
    said = capsys.readouterr()
    assert code == 2, said
    assert said.err.startswith("error: ") or "left out: " in said.err
    assert said.err.count("error: ") == 1
    assert "Traceback" not in said.err
    assert "ε = " not in said.out
    return said.err


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("damage", SPENT.values(), ids=SPENT.keys())
def test_an_epsilon_that_its_ledger_does_not_bear_out_is_not_shown(
    copied: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copied)
    for said in (
        refused(capsys, "train", *WORDS, "--out", str(copied)),
        refused(capsys, "report", str(copied)),
        refused(capsys, "results", str(copied.parent), "--each", "--format", "csv"),
    ):
        assert "ledger.jsonl" in said


def chained(lines: list[dict[str, Any]], folder: Path) -> None:
    """Write a ledger of these lines, with hashes that verify."""
    last, text = "", ""
    for line in lines:
        body = json.dumps({key: line[key] for key in line if key != "hash"}, sort_keys=True, separators=(",", ":"))
        last = hashlib.sha256((last + body).encode()).hexdigest()
        text += json.dumps({**line, "hash": last}) + "\n"
    (folder / "ledger.jsonl").write_text(text)
    (folder / "ledger.jsonl.head").write_text(json.dumps({"hash": last, "lines": len(lines)}) + "\n")


@pytest.mark.parametrize("stated", [0.5, None], ids=["the same in the summary", "no summary"])
def test_the_epsilon_of_a_ledger_is_that_of_its_releases(
    copied: Path, stated: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that somebody hands out, without its checkpoint, whose ledger states less than its releases amount to."""
    shutil.rmtree(copied / "checkpoint")
    lines = [json.loads(line) for line in (copied / "ledger.jsonl").read_text().splitlines()]
    mu = math.sqrt(sum(line["count"] / line["multiplier"] ** 2 for line in lines[1:]))
    chained([*lines[:-1], {**lines[-1], "epsilon": 0.5}], copied)
    if stated is not None:
        edited("summary.json", lambda held: held["privacy"].update(epsilon=stated))(copied)
        for words in (["report", str(copied)], ["results", str(copied.parent), "--each", "--format", "csv"]):
            assert "ledger.jsonl amounts to epsilon = 8 " in refused(capsys, *words)
        return
    (copied / "summary.json").unlink()
    capsys.readouterr()
    assert command(["results", str(copied), "--each", "--format", "json"]) == 0
    shown, normal = json.loads(capsys.readouterr().out)[0]["epsilon"], NormalDist()
    delta = normal.cdf(-shown / mu + mu / 2) - math.exp(shown) * normal.cdf(-shown / mu - mu / 2)
    assert delta == pytest.approx(1e-5, rel=1e-6)


UNDERCHARGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lines that charge nothing": ({}, {"charged": 0}),
    "a cycle that is as long as the run": ({"groups": 3}, {"charged": 0}),
    "a first release that is repeated for nothing": ({"groups": 3}, {"charged": 0, "round": 0}),
    "coins that nobody stated": ({}, {"rate": 0.01}),
    "no groups at all": ({"groups": 0}, {"charged": 0}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("change", UNDERCHARGED.values(), ids=list(UNDERCHARGED))
def test_a_ledger_whose_lines_charge_too_little_is_not_shown(
    copied: Path, change: tuple[dict[str, Any], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that somebody hands out, without checkpoint and summary: its lines say that releases cost less."""
    shutil.rmtree(copied / "checkpoint")
    (copied / "summary.json").unlink()
    header, *lines = (json.loads(line) for line in (copied / "ledger.jsonl").read_text().splitlines())
    groups, less = change
    chained([{**header, **groups}, lines[0], *({**line, **less, "epsilon": 5.0} for line in lines[1:])], copied)
    for words in (["report", str(copied)], ["results", str(copied.parent), "--each", "--format", "csv"]):
        assert "ledger.jsonl is" in refused(capsys, *words)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "now"),
    [("delta", 1e-12), ("unit", "record"), ("relation", "replace"), ("trust", "local"), ("noise", "secure")],
)
def test_an_epsilon_is_not_shown_beside_another_promise(
    copied: Path, name: str, now: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that somebody hands out, without its checkpoint, whose settings say more than its ledger."""
    shutil.rmtree(copied / "checkpoint")
    before = json.loads((copied / "ledger.jsonl").read_text().splitlines()[0])["privacy"][name]
    assert before != now
    edited("summary.json", lambda held: held["config"].update({name: now}))(copied)
    said = refused(capsys, "results", str(copied.parent), "--each", "--format", "csv")
    assert f"{name} = {before!r}, and the settings say {now!r}" in said
    with pytest.raises(UsageError, match=f"{name} = "):
        normec.load(copied)
    replaced("config.toml", f'"{name}" = {json.dumps(before)}', f'"{name}" = {json.dumps(now)}')(copied)
    assert f"{name} = {before!r}, and the settings say {now!r}" in refused(capsys, "report", str(copied))
    (copied / "summary.json").unlink()
    said = refused(capsys, "results", str(copied.parent), "--each", "--format", "csv")
    assert f"{name} = {before!r}, and the settings say {now!r}" in said


def test_a_promise_is_made_in_the_words_of_the_ledger(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that somebody hands out, whose summary promises in its own words what no ledger supports."""
    false = "Protected: all people. Against: anyone who sees every message. Strength: (epsilon, delta) = (0.01, 1e-30)."
    before = json.loads((copied / "summary.json").read_text())["privacy"]["statement"]
    assert "Against: a server that sees only the sum" in before
    edited("summary.json", lambda held: held["privacy"].update(statement=false, sigma=1e9))(copied)
    loaded = normec.load(copied).privacy
    assert loaded is not None
    assert loaded.statement == before
    other = Path(shutil.copytree(copied, tmp_path / "runs" / "other"))
    pages = [["report", str(copied)], ["report", str(copied), str(other), "--out", str(tmp_path / "both.html")]]
    for words in pages:
        assert command(words) == 0
    for text in ((copied / "report.html").read_text(), (tmp_path / "both.html").read_text()):
        assert "a server that sees only the sum of all messages" in text
        assert not any(word in text for word in ("all people", "sees every message", "1e-30", "σ = 1e9"))
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_ledger_is_not_taken_for_that_of_a_run_without_privacy(
    copied: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of a run whose summary states no privacy must not be shown with an ε of their own."""
    edited("summary.json", lambda held: held.update(privacy=None, status=status))(copied)
    edited("summary.json", lambda held: held["final"].update(epsilon=0.1))(copied)
    said = refused(capsys, "results", str(copied.parent), "--each", "--format", "csv")
    assert "3 releases, and summary.json states no privacy" in said
    with pytest.raises(UsageError, match="states no privacy"):
        normec.load(copied)


@pytest.mark.parametrize("field", ["count", "multiplier", "epsilon"])
def test_a_number_that_no_float_holds_is_damage(copied: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "checkpoint")
    lines = [json.loads(line) for line in (copied / "ledger.jsonl").read_text().splitlines()]
    chained([*lines[:-1], {**lines[-1], field: 10**400}], copied)
    assert "is not what a run writes" in refused(capsys, "results", str(copied.parent), "--each", "--format", "csv")


def test_a_summary_whose_privacy_lacks_an_entry_is_damaged(copied: Path) -> None:
    edited("summary.json", lambda held: held["privacy"].pop("sigma"))(copied)
    with pytest.raises(UsageError, match="its privacy is not what a run writes"):
        _ = normec.load(copied).privacy


def test_the_ledger_and_not_the_rows_states_the_epsilon(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without summary and checkpoint, rows and ledger are left, and the rows were edited."""
    (copied / "summary.json").unlink()
    shutil.rmtree(copied / "checkpoint")
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    paid = rows[-1]["epsilon"]
    (copied / "metrics.jsonl").write_text("".join(json.dumps({**row, "epsilon": 0.5}) + "\n" for row in rows))
    capsys.readouterr()
    assert command(["results", str(copied), "--each", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["epsilon"] == paid


def test_a_copy_that_nobody_touched_is_shown(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", *WORDS, "--out", str(copied)], ["report", str(copied)], ["results", str(copied)]):
        assert command(words) == 0, capsys.readouterr()


def test_a_finished_run_whose_checkpoint_was_removed_is_still_shown(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "checkpoint")
    for words in (["train", *WORDS, "--out", str(copied)], ["report", str(copied)], ["results", str(copied)]):
        assert command(words) == 0, capsys.readouterr()


def test_rows_alone_do_not_bear_out_an_epsilon(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that could speak against the rows is gone: summary, checkpoint and ledger."""
    removed("summary.json", "ledger.jsonl", "ledger.jsonl.head")(copied)
    shutil.rmtree(copied / "checkpoint")
    for said in (
        refused(capsys, "report", str(copied)),
        refused(capsys, "results", str(copied.parent), "--each", "--format", "csv"),
    ):
        assert "ledger.jsonl is missing" in said


UNREADABLE = {
    "latest.json removed": (removed("checkpoint/latest.json"), "latest.json"),
    "latest.json emptied": (emptied("checkpoint/latest.json"), "latest.json"),
    "latest.json a folder": (made_a_folder("checkpoint/latest.json"), "latest.json"),
    "checkpoint removed": (lambda folder: shutil.rmtree(folder / "checkpoint"), "latest.json"),
    "state removed": (removed("checkpoint/round-00000003.safetensors"), "round-00000003.safetensors"),
    "state emptied": (emptied("checkpoint/round-00000003.safetensors"), "round-00000003.safetensors"),
    "state a folder": (made_a_folder("checkpoint/round-00000003.safetensors"), "round-00000003.safetensors"),
    "metrics removed": (removed("metrics.jsonl"), "metrics.jsonl"),
    "metrics emptied": (emptied("metrics.jsonl"), "metrics.jsonl"),
    "metrics a folder": (made_a_folder("metrics.jsonl"), "metrics.jsonl"),
    "config removed": (removed("config.toml"), "config.toml"),
    "config a folder": (made_a_folder("config.toml"), "config.toml"),
    "config no text": (lambda folder: (folder / "config.toml").write_bytes(b"\xff\x00"), "config.toml"),
    "ledger removed": (removed("ledger.jsonl"), "ledger.jsonl"),
    "ledger emptied": (emptied("ledger.jsonl"), "ledger.jsonl"),
    "ledger a folder": (made_a_folder("ledger.jsonl"), "ledger.jsonl"),
    "head removed": (removed("ledger.jsonl.head"), "ledger.jsonl.head"),
    "head emptied": (emptied("ledger.jsonl.head"), "ledger.jsonl.head"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("damage", "name"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_run_to_be_resumed_that_has_lost_a_file_is_refused_and_left_alone(
    copied: Path, damage: Callable[[Path], Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without summary.json, as a kill just before the end leaves it."""
    (copied / "summary.json").unlink()
    damage(copied)
    before, files = sorted(copied.rglob("*")), snapshot(copied)
    assert name in refused(capsys, "train", *WORDS, "--out", str(copied))
    assert (sorted(copied.rglob("*")), snapshot(copied)) == (before, files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["checkpoint/latest.json", "metrics.jsonl", "ledger.jsonl", "config.toml"])
def test_a_file_of_another_user_is_named(copied: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "summary.json").unlink()
    for path in (copied, *copied.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(copied / name, 0, 0)
    (copied / name).chmod(0o600)
    beside = os.environ.get("PYTEST_DEBUG_TEMPROOT")  # the same disk or memory: a folder is renamed, not copied
    with tempfile.TemporaryDirectory(dir=beside) as open_to_all:  # another start of pytest closes its own to others
        Path(open_to_all).chmod(0o755)
        moved = copied.rename(Path(open_to_all) / "run")
        os.seteuid(65534)
        try:
            capsys.readouterr()
            code = command(["train", *WORDS, "--out", str(moved)])
            said = capsys.readouterr().err
        finally:
            os.seteuid(0)
    assert code in (1, 2)
    assert said.count("\n") == 1
    assert name in said


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_clients_keep_to_themselves_is_for_the_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert command(["train", *WORDS, "--out", str(tmp_path / "run"), "--diagnostics", "--set", "noise=secure"]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "run/checkpoint").stat().st_mode & 0o777 == 0o700
    private = ["metrics.jsonl", "ledger.jsonl", "ledger.jsonl.head", "clients.json"]
    for path in [*(tmp_path / "run/checkpoint").iterdir(), *(tmp_path / "run" / name for name in private)]:
        assert path.stat().st_mode & 0o777 == 0o600, path.name
