"""Folders that somebody damaged, or made to harm: they cost neither the rest nor more than a line and a moment."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from normec.cli.app import run
from normec.errors import UsageError
from normec.experiments import results
from normec.privacy.hash_chain import Chain
from normec.report import page, run_page, run_view, runs_page
from normec.report.listing import Listing
from normec.report.server import Server

from ..cli.command import normec
from ..support.waiting import LIMIT
from .conftest import serving
from .test_pages import read
from .test_server import changes, get

FILES = ("summary.json", "config.toml", "metrics.jsonl", "clients.json", "ledger.jsonl", "checkpoint/latest.json")


def within_limit(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own, so that a read that waits for ever fails the test."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert found, "it waits for something that never comes"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def put(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "deep rows": lambda path: path.write_text("[" * 200_000 + "\n"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "a string": lambda path: path.write_text('"a string"\n'),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "a number with too many digits": lambda path: path.write_text("9" * 10_000 + "\n"),
    "null": lambda path: path.write_text("null\n"),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_takes_nothing_else_with_it(name: str, kind: str, library: Path, tmp_path: Path) -> None:
    shutil.copytree(library / "private", tmp_path / "runs" / "private")
    shutil.copytree(library / "plain", tmp_path / "runs" / "plain")
    put(tmp_path / "runs" / "private" / name, DAMAGE[kind])
    written = tmp_path / "runs" / "private"
    if name == "ledger.jsonl":  # an epsilon without its ledger is not shown, and neither is the run
        with pytest.raises(UsageError, match=r"ledger\.jsonl"):
            within_limit(lambda: page.write_run(written))
    else:
        assert "NormEC" in read(within_limit(lambda: page.write_run(written))).text
    entries = within_limit(lambda: Listing(tmp_path / "runs").changes(None)["changed"])
    assert {entry["path"] for entry in entries} == {"private", "plain"}
    found = within_limit(lambda: results.collect([tmp_path / "runs"]))
    assert (tmp_path / "runs" / "plain") in [record.folder for record in found.records]
    assert all("\n" not in line for line in found.notes)


WRONG: dict[str, Any] = {"text": "text", "list": [1], "table": {"a": {"b": 1}}, "truth": True, "huge": 10**400}


@pytest.mark.slow
@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", ["summary.json", "checkpoint/latest.json", "metrics.jsonl", "clients.json"])
def test_a_value_of_the_wrong_kind_is_left_out(name: str, value: str, library: Path, tmp_path: Path) -> None:
    """Every value in the file, one after another, down to the second level."""
    folder = Path(shutil.copytree(library / "diagnosed", tmp_path / "runs" / "diagnosed"))
    whole = (folder / name).read_text()
    held = json.loads(whole.splitlines()[0] if name.endswith("jsonl") else whole)
    paths = [(key,) for key in held] + [
        (key, inner) for key, below in held.items() if isinstance(below, dict) for inner in below
    ]
    for path in paths:
        changed = json.loads(json.dumps(held))
        inner = changed if len(path) == 1 else changed[path[0]]
        inner[path[-1]] = WRONG[value]
        (folder / name).write_text(json.dumps(changed) + "\n")
        view = run_view.read_run(folder)
        assert "NormEC" in run_page.render(view), path
        assert "Results" in runs_page.render({"one": view, "two": view}, {}, title="two"), path
        (entry,) = Listing(tmp_path / "runs").changes(None)["changed"]
        assert entry["status"] != "unreadable", path
        results.over_seeds(results.collect([folder, library / "plain"]).records)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["'text'", "[1]", "{a = 1}", "true", "1979-05-27", "nan"])
def test_a_setting_of_the_wrong_kind_is_left_out(value: str, copied: Path) -> None:
    folder = copied / "private"
    lines = (folder / "config.toml").read_text().splitlines()
    (folder / "summary.json").unlink()
    for at, line in enumerate(lines):
        changed = [*lines[:at], f"{line.partition(' = ')[0]} = {value}", *lines[at + 1 :]]
        (folder / "config.toml").write_text("\n".join(changed) + "\n")
        assert run_page.render(run_view.read_run(folder))
        assert results.collect([folder, copied / "plain"]).records


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "release", "round": 0},
        {"kind": "release", "round": 0, "count": 1, "multiplier": 0, "sigma": 1, "rate": 1, "epsilon": 1, "attempt": 0},
        {"kind": "release", "round": "0", "count": [], "multiplier": "x", "sigma": 1, "rate": {}, "epsilon": 1},
    ],
)
def test_a_ledger_that_verifies_but_makes_no_sense_is_not_believed(line: dict[str, Any], copied: Path) -> None:
    for path in (copied / "private").glob("ledger.jsonl*"):
        path.unlink()
    with Chain(copied / "private" / "ledger.jsonl") as chain:
        chain.append(line)
    with pytest.raises(UsageError, match=r"ledger\.jsonl"):
        page.write_run(copied / "private")
    with pytest.raises(UsageError, match=r"ledger\.jsonl"):
        page.write_many([copied / "private", copied / "plain"], copied / "many.html")


def test_large_files_are_not_read(copied: Path) -> None:
    with (copied / "private" / "metrics.jsonl").open("ab") as file:
        file.truncate(run_view.MOST_BYTES + 1)
    text = read(page.write_run(copied / "private")).text
    assert "metrics.jsonl has 67,108,865 bytes; at most 67,108,864 are read" in text


@pytest.fixture
def closed(library: Path, tmp_path: Path) -> Iterator[Path]:
    """Two runs, of which one may not be searched and one has a file that may not be read; by an ordinary user."""
    root = tmp_path / "runs"
    for name in ("searched", "read", "open"):
        shutil.copytree(library / "plain", root / name)
    (root / "searched").chmod(0)
    (root / "read" / "summary.json").chmod(0)
    above = [one for one in tmp_path.parents if one.owner() == "root" and not one.stat().st_mode & stat.S_IXOTH]
    modes = {one: one.stat().st_mode for one in (tmp_path, *above)}
    ordinary = os.geteuid()
    if ordinary == 0:
        for one in modes:
            one.chmod(0o755)
        os.seteuid(65534)
    yield root
    os.seteuid(ordinary)
    for one, mode in modes.items():
        one.chmod(mode)
    (root / "searched").chmod(0o755)


def test_what_may_not_be_read_is_said(closed: Path) -> None:
    entries = {entry["path"] for entry in Listing(closed).changes(None)["changed"]}
    assert {"read", "open"} <= entries
    view = run_view.read_run(closed / "read")
    assert view.notes == ["summary.json cannot be read: Permission denied"]
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        page.render(closed / "searched")
    found = results.collect([closed])
    assert [record.folder.name for record in found.records] == ["open"]


COMPARISONS = (
    *("{}", "[1]", '[{"method": 1}]', '[{"method": "normec", "tried": {"x": 1}}]', '[{"method": "a", "tried": []}]'),
    *('[{"method": "normec", "tried": {"0.1": "x"}, "folder": 3}]', "[" * 100_000),
)


@pytest.mark.parametrize("text", COMPARISONS)
def test_a_file_that_is_no_comparison_is_refused_in_one_line(text: str, copied: Path) -> None:
    (copied / "comparison" / "comparison.json").write_text(text)
    with pytest.raises(UsageError, match=r"comparison\.json is ") as refused:
        page.write(copied / "comparison")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"checks": [1], "slopes": {}, "notes": []}', '{"checks": {}}'])
def test_a_file_that_is_no_verification_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text(text)
    with pytest.raises(UsageError, match="is not what a verification writes"):
        page.write(tmp_path)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "noise", "deep JSON", "a link to itself"])
def test_a_sweep_s_own_file_may_be_damaged(kind: str, copied: Path) -> None:
    put(copied / "sweep" / "sweep.toml", DAMAGE[kind])
    assert "Heat map" in read(within_limit(lambda: page.write(copied / "sweep"))).text


# The server.


@pytest.fixture
def server(library: Path, tmp_path: Path) -> Iterator[Server]:
    """Serves two sound runs and a broken one of every kind."""
    root = tmp_path / "runs"
    for name in ("private", "plain"):
        shutil.copytree(library / name, root / name)
    for name in FILES:
        for kind, make in DAMAGE.items():
            folder = root / f"{kind} as {name.replace('/', ' ')}"
            folder.mkdir()
            (folder / "config.toml").write_text('method = "normec"\n')
            put(folder / name, make)
    with serving(root) as running:
        yield running


def test_broken_runs_do_not_empty_the_list_or_stop_the_server(server: Server) -> None:
    listed = {entry["path"]: entry for entry in changes(server)["changed"]}
    assert listed["private"]["status"] == "finished"
    assert listed["plain"]["accuracy"] is not None
    present = {path.name for path in server.listing.root.iterdir() if run_view.is_run(path)}
    assert present == set(listed)
    assert len(present) > len(DAMAGE) * (len(FILES) - 1)
    for name in listed:
        status, body, _ = get(server, f"/run/{listed[name]['address']}")
        assert status == 200, (name, body[:200])
        assert get(server, f"/rows/{listed[name]['address']}")[0] == 200


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "path",
    [
        *(
            "/rows/private?have=x",
            "/rows/private?have=%C2%B2",
            "/rows/private?last=-2",
            "/rows/private?have=1&last=1.5",
        ),
        *(f"/rows/private?have={'9' * 5000}", "/api/runs?since=%C2%B2", "/api/runs?since=a-b", "/api/runs?since=a-%B2"),
        *(
            f"/api/runs?since=a-{'9' * 5000}",
            "/together",
            "/together?run=",
            "/together?" + "run=private&" * 2000,
        ),
        "/api/runs?since=%00%1b[31m",
    ],
)
def test_a_bad_query_is_refused_in_one_line(path: str, server: Server) -> None:
    status, body, headers = get(server, path)
    assert status == 400
    assert headers["Content-Type"].startswith("text/plain")
    line = body.decode()
    assert line
    assert len(line) < 300
    assert line.isprintable()
    assert get(server, "/run/private")[0] == 200  # and the server goes on


def test_a_sweep_is_not_put_beside_runs(server: Server, library: Path) -> None:
    shutil.copytree(library / "sweep", server.listing.root / "sweep")
    status, body, _ = get(server, "/together?run=private&run=sweep")
    assert (status, body) == (400, b"sweep is not a single run; only runs can be shown together")


def test_folders_whose_names_are_not_utf_8_are_shown(server: Server, library: Path) -> None:
    shutil.copytree(library / "plain", server.listing.root / os.fsdecode(b"na\xefve %2e?#"))
    (entry,) = (one for one in changes(server)["changed"] if one["name"].startswith("na"))
    assert entry["address"] == "na%EFve%20%252e%3F%23"
    status, body, _ = get(server, f"/run/{entry['address']}")
    assert status == 200
    assert f"/rows/{entry['address']}".encode() in body
    assert get(server, f"/together?run={entry['address']}&run=plain")[0] == 200


# The commands.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "deep JSON", "a link to itself"])
def test_results_names_the_path_of_what_it_cannot_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with nothing that can be read in it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").mkdir()
    put(tmp_path / "run" / "summary.json", DAMAGE[kind])
    monkeypatch.chdir(tmp_path)
    assert within_limit(lambda: run(["results", "run"])) == 2
    said = capsys.readouterr().err
    assert "run/summary.json" in said or "run is incomplete" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_command_refuses_in_one_line_what_is_nested_too_deeply(tmp_path: Path) -> None:
    put(tmp_path / "comparison.json", lambda path: path.write_text("[" * 100_000))
    report = normec("report", ".", cwd=tmp_path)
    assert report.returncode == 2
    assert report.stderr == "error: comparison.json is damaged: it is nested too deeply\n"
