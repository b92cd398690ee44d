"""The live page: what its server gives and refuses, and that it follows a run while it trains."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normec.errors import UsageError
from normec.report.server import Server

from ..cli.command import start
from ..support.waiting import LIMIT
from .conftest import serving

ENDLESS = "10000000"


@pytest.fixture
def server(copied: Path) -> Iterator[Server]:
    with serving(copied) as running:
        yield running


def get(server: Server, path: str, host: str | None = None) -> tuple[int, bytes, http.client.HTTPMessage]:
    port = int(server.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.putrequest("GET", path, skip_host=True)  # the path goes out as it is
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def changes(server: Server, token: str = "") -> dict[str, Any]:
    return dict(json.loads(get(server, f"/api/runs?since={token}")[1]))


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.getuid() != 0, reason="only root can become another user"
)
def test_other_users_of_the_machine_see_no_runs(server: Server) -> None:
    os.seteuid(65534)  # a socket belongs to the user who created it
    try:
        caller = socket.socket()
    finally:
        os.seteuid(0)
    with caller:
        caller.settimeout(LIMIT)
        caller.connect(server.server_address)
        caller.sendall(f"GET /rows/private HTTP/1.0\r\nHost: {server.address[7:-1]}\r\n\r\n".encode())
        assert caller.makefile("rb").readline().split()[1] == b"403"
    assert get(server, "/rows/private")[0] == 200


def test_every_page_is_served_under_a_strict_policy(server: Server) -> None:
    for path in ("/", "/run/private", "/run/comparison", "/run/sweep", "/together?run=private&run=plain"):
        status, body, headers = get(server, path)
        assert status == 200, path
        assert body.startswith(b"<!doctype html>")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.jsonl.head"])
def test_the_list_shows_no_epsilon_once_its_ledger_is_damaged(name: str, server: Server) -> None:
    before = changes(server)
    (entry,) = (one for one in before["changed"] if one["path"] == "private")
    assert entry["epsilon"] > 0
    ledger = server.listing.root / "private" / name
    ledger.write_bytes(ledger.read_bytes()[:-20])
    (entry,) = changes(server, before["token"])["changed"]
    assert (entry["path"], entry["epsilon"], entry["shown_epsilon"]) == ("private", None, "")


def test_the_list_has_the_test_loss_of_a_private_run_and_no_other(server: Server) -> None:
    entries = {entry["path"]: entry for entry in changes(server)["changed"]}
    assert entries["private"]["loss"] is None
    assert entries["private"]["test_loss"] > 0
    assert entries["plain"]["loss"] > 0


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "path",
    [
        *("/run/..", "/run/../..", "/run/%2e%2e/%2e%2e/etc", "/run//etc", "/run/private/../../..", "/run/private%00"),
        *("/run/private/checkpoint", "/run/private/summary.json", "/rows/..%2fruns%2fprivate", "/together?run=../x"),
        *("/assets/../page.py", "/assets/..%2fpage.py", "/assets/", "/private/summary.json", "/api/", "/api/else"),
    ],
)
def test_nothing_else_is_served(path: str, server: Server) -> None:
    status, body, _ = get(server, path)
    assert status == 404
    assert b"root:" not in body
    assert len(body) < 200


def test_a_link_out_of_the_folder_is_not_followed(server: Server, copied: Path, library: Path) -> None:
    (copied / "outside").symlink_to(library / "private", target_is_directory=True)
    assert get(server, "/run/outside")[0] == 404


def test_other_names_of_this_machine_are_refused(server: Server) -> None:
    assert get(server, "/", host="evil.example")[0] == 403
    assert get(server, "/api/runs", host="evil.example:80")[0] == 403
    assert get(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_only_what_changed_is_sent_again(server: Server, copied: Path) -> None:
    first = changes(server)
    assert first["whole"]
    runs = {entry["path"]: entry for entry in first["changed"]}
    assert runs["private"]["status"] == "finished"
    assert runs["private"]["epsilon"] == pytest.approx(8)
    assert runs["diverged"]["status"] == "diverged"
    assert runs["sweep"]["kind"] == "sweep"
    assert sum(entry["kind"] == "run" for entry in first["changed"]) == 4 + 5 + 9

    assert changes(server, first["token"])["changed"] == []
    shutil.copytree(copied / "private", copied / "another")
    shutil.rmtree(copied / "plain")
    (copied / "half").mkdir()
    (copied / "half" / "metrics.jsonl").write_bytes(b'{"round": 0, "loss": 1.0}\n{"round": 1, "lo')
    second = changes(server, first["token"])
    assert {entry["path"] for entry in second["changed"]} == {"another", "half"}
    assert second["gone"] == ["plain"]
    assert not second["whole"]
    assert get(server, "/run/half")[0] == 200
    assert changes(server, "other-7")["whole"]  # a token of another server


def test_new_rows_are_sent_once(server: Server, copied: Path) -> None:
    def ask(have: int, last: int) -> dict[str, Any]:
        return dict(json.loads(get(server, f"/rows/private?have={have}&last={last}")[1]))

    first = ask(-1, -1)
    assert first["anew"]
    assert [row["round"] for row in first["rows"]] == list(range(13))
    path = copied / "private" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"round": 13, "loss": 0.5}\n')
    second = ask(first["have"], first["last"])
    assert not second["anew"]
    assert [row["round"] for row in second["rows"]] == [13]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # as a resumed run cuts it
    third = ask(second["have"], second["last"])
    assert third["anew"]
    assert len(third["rows"]) == 5


def test_a_port_in_use_and_a_missing_folder_are_said(server: Server, tmp_path: Path) -> None:
    port = int(server.server_address[1])
    with pytest.raises(UsageError, match=f"port {port} cannot be used"):
        Server(tmp_path, port)
    with pytest.raises(UsageError, match="there is no folder"):
        Server(tmp_path / "nothing")


@pytest.mark.slow
def test_the_list_follows_a_run_that_trains(tmp_path: Path, look: Any) -> None:
    """A real process trains, another serves, a browser watches: rounds go up, a page appears and comes to its end."""
    (tmp_path / "runs").mkdir()
    served = start("ui", "runs", "--no-open", cwd=tmp_path)
    assert served.stdout is not None
    address = served.stdout.readline().split(" on ")[1].split()[0]
    try:
        page = look().open(address)
        page.get_by_text("No runs here yet").wait_for()
        settings = ["--no-privacy", "--set", "log_every=200", "--set", "engine=linear"]  # rows from the first second on
        training = start("train", "--rounds", ENDLESS, *settings, "--out", "runs/live", "--quiet", cwd=tmp_path)
        line = page.locator("tr", has_text="live")
        line.get_by_text("training").wait_for()
        done = "bar => bar.value"
        before = line.locator("progress").evaluate(done)
        page.wait_for_function("before => document.querySelector('tr progress').value > before", arg=before)
        line.get_by_role("link", name="live").click()
        page.wait_for_selector("html[data-followed]")
        count = "document.querySelector('#chart-loss .plot').data[0].x.length"
        drawn = page.evaluate(count)
        page.wait_for_function(f"before => {count} > before", arg=drawn)
        training.send_signal(signal.SIGINT)
        training.communicate(timeout=LIMIT)
        page.locator(".pill", has_text="interrupted").wait_for()
        assert f"of {ENDLESS} rounds, when it was interrupted," in page.locator("h1").text_content()
    finally:
        served.send_signal(signal.SIGINT)
        _, said = served.communicate(timeout=LIMIT)
    assert served.returncode == 0
    assert said == ""
