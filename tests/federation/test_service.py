"""A party as a service: its file, its log, its exit codes, and the templates for systemd and containers."""

from __future__ import annotations

import configparser
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")

from normec import UsageError
from normec.cli.app import run
from normec.cli.service_log import LOGGERS, JsonLines, log_to_stdout
from normec.federation.flower.party_file import load_party_file
from normec.federation.flower.scaffold import write_app
from normec.federation.flower.supernode import NotAdmitted, Signals, watched_client
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import load_policy

from ..support.waiting import LIMIT
from .faulty_network import DIMENSION, Quadratic
from .hostile import HostileServer, zeros
from .party_files import make_ssh_key

ALL = {
    "superlink": "fed.example.org:9092",
    "root_certificates": "ca.crt",
    "key": "party",
    "app": "app",
    "folder": "state",
    "policy": "policy.toml",
}


def write(where: Path, **entries: object) -> Path:
    path = where / "party.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in {**ALL, **entries}.items()))
    return path


def test_paths_are_relative_to_the_file_and_flags_take_precedence(tmp_path: Path) -> None:
    own = load_party_file(write(tmp_path, data="patients.csv", folder="/srv/state"), {"superlink": "other:1"})
    assert own.key == tmp_path / "party"
    assert own.data == tmp_path / "patients.csv"
    assert own.folder == Path("/srv/state")
    assert own.superlink == "other:1"
    assert own.node_config["data"] == str(tmp_path / "patients.csv")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"datas": "x.csv"}, "there is no entry 'datas', did you mean 'data'"),
        ({"superlink": "fed.example.org"}, "superlink: string should match pattern"),
        ({"log_format": "xml"}, "log_format: input should be 'text' or 'json'"),
        ({"patience": -1}, "patience: input should be greater than or equal to 0"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_party_file(write(tmp_path, **entries))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text('superlink = "a:1"\n')
    with pytest.raises(UsageError, match=r"root_certificates is missing; give it there, or as --root-certificates"):
        load_party_file(tmp_path / "party.toml")
    with pytest.raises(UsageError, match="there is no party file"):
        load_party_file(tmp_path / "none.toml")


def test_the_file_of_the_template_is_complete(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    assert load_party_file(tmp_path / "app" / "party.toml").app.resolve() == (tmp_path / "app").resolve()


def test_the_log_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in LOGGERS}
    try:
        log_to_stdout("json")
        logging.getLogger("normec.party").info("one\ntwo %s", "ü")
        log_to_stdout("text")
        logging.getLogger("normec.party").warning("three\nfour")
    finally:
        for name, (handlers, propagate) in before.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate
            logging.getLogger(name).setLevel(logging.NOTSET)
    first, second = capsys.readouterr().out.splitlines()
    found = json.loads(first)
    assert (found["level"], found["logger"], found["message"]) == ("info", "normec.party", "one\ntwo ü")
    assert found["time"].endswith("+00:00")
    assert second == "three\\nfour"


def test_no_character_of_a_log_controls_the_terminal() -> None:
    """A server names the settings of a method, and a party's log repeats the names that it refuses."""
    said = "\x9b2J \u202e \U000e0001 \x1b[2J ü"
    line = JsonLines().format(logging.LogRecord("normec", logging.WARNING, "", 0, said, (), None))
    assert line.isprintable()
    assert "ü" in line
    assert json.loads(line)["message"] == said


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    write_app(tmp_path / "heart")
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(tmp_path / "heart" / "normec-party.service", encoding="utf-8")
    assert unit["Service"]["WorkingDirectory"] == "/srv/heart"
    assert unit["Service"]["RestartPreventExitStatus"] == "2 3 5"
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed; the unit was only parsed")
    text = (tmp_path / "heart" / "normec-party.service").read_text()
    path = tmp_path / "normec-party.service"
    path.write_text(text.replace("/opt/normec/bin/normec", sys.executable))
    done = subprocess.run([program, "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert "normec-party.service" not in done.stderr, done.stderr


def test_the_container_file_starts_the_party(tmp_path: Path) -> None:
    write_app(tmp_path / "heart")
    lines = (tmp_path / "heart" / "Containerfile").read_text().splitlines()
    words = {line.split()[0]: line.partition(" ")[2] for line in lines if line and not line.startswith("#")}
    command = [*json.loads(words["ENTRYPOINT"]), *json.loads(words["CMD"])]
    assert command == ["normec", "federation", "party", "party.toml", "--log-format", "json"]
    assert words["USER"] == "1000:1000"


def prepared(folder: Path, policy: str = "epsilon = 8.0\n") -> Path:
    write_app(folder / "app")
    (folder / "policy.toml").write_text(policy)
    (folder / "ca.crt").write_text("no certificate")
    make_ssh_key(folder / "party")
    return write(folder, superlink="127.0.0.1:1")


@pytest.mark.slow
def test_a_party_without_budget_ends_with_code_5(tmp_path: Path) -> None:
    """In a process of its own, because the command changes the logs and the modules of its process."""
    file = prepared(tmp_path, "epsilon = 0.4\n")
    rules = load_policy(tmp_path / "policy.toml")
    server = HostileServer(Party(tmp_path / "state", rules, Quadratic()), zeros(DIMENSION))
    server.ask()
    (tmp_path / "policy.toml").write_text("epsilon = 0.1\n")
    done = subprocess.run(
        [sys.executable, "-m", "normec", "federation", "party", str(file), "--log-format", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=LIMIT,
    )
    assert done.returncode == 5, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["level"] == "error"
    assert "the budget is spent" in line["message"]


def test_a_party_without_a_policy_is_a_mistake_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    before = {name: logging.getLogger(name).handlers for name in LOGGERS}
    try:
        assert run(["federation", "party", str(file)]) == 2
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, True
    assert "there is no policy" in capsys.readouterr().err


def test_a_key_that_the_server_forgot_is_no_wish_to_stop() -> None:
    """A signal of the owner ends the process with 0; a heartbeat that is not authorised ends it as not admitted."""
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("POST", "https://server")

    class Server:
        status = 401

        def SendNodeHeartbeat(self, _: object) -> None:  # noqa: N802
            raise httpx.HTTPStatusError("refused", request=request, response=httpx.Response(self.status))

    def beat(status: int) -> None:
        with Signals() as signals:
            client = watched_client(Server, signals)()  # type: ignore[arg-type]
            client.status = status  # type: ignore[attr-defined]
            client.SendNodeHeartbeat(None)  # type: ignore[arg-type]

    with pytest.raises(NotAdmitted, match="no longer knows this party's key"):
        beat(401)
    with pytest.raises(httpx.HTTPStatusError):
        beat(503)
    with pytest.raises(SystemExit) as ended, Signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.code == 0
