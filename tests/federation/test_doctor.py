"""The doctor on a party's own files; what needs a server is checked in `federation_network.test_tutorial`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr.app")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from normec.cli.app import run
from normec.federation.flower.doctor import LEAST_DISK, Finding, examine
from normec.federation.flower.new_terms import new_terms
from normec.federation.flower.party_file import load_party_file
from normec.federation.flower.scaffold import write_app
from normec.federation.local.processes import free_port
from normec.federation.protocol.account import FILE
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import load_policy

from .faulty_network import DIMENSION, Quadratic
from .hostile import HostileServer, zeros
from .party_files import forget_app, make_ssh_key

TABLE = 'target = "ill"\nclasses = [0, 1]\n[inputs]\nage = {low = 20, high = 90}\n'


def certificate(path: Path, days: float) -> None:
    """A certificate of an authority that is valid for so many days from now, or was until so many days ago."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ours")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=100))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(Encoding.PEM))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("party")
    (folder / "schema.toml").write_text(TABLE)
    write_app(folder / "app", schema=folder / "schema.toml")
    certificate(folder / "ca.crt", 300)
    make_ssh_key(folder / "party")
    (folder / "patients.csv").write_text("age,ill\n30,0\n95,1\n")
    (folder / "policy.toml").write_text("epsilon = 8.0\n")
    (folder / "party.toml").write_text(
        f'superlink = "127.0.0.1:{free_port()}"\nroot_certificates = "ca.crt"\nkey = "party"\napp = "app"\n'
        'folder = "state"\npolicy = "policy.toml"\ndata = "patients.csv"\n'
    )
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "here")
    forget_app()
    return tmp_path / "here"


def found(folder: Path) -> dict[str, Finding]:
    return {one.check: one for one in examine(load_party_file(folder / "party.toml"))}


def test_a_new_party(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = found(folder)
    states = {name: one.state for name, one in checks.items()}
    assert states.pop("server") == "problem"
    assert states.pop("data") == "warning"
    assert set(states.values()) == {"ok"}
    assert "is the SuperLink running?" in checks["server"].text
    assert "age: 1 value outside the public range was clipped" in checks["data"].text
    assert run(["federation", "doctor", str(folder / "party.toml"), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert not table["ok"]
    assert [one["check"] for one in table["findings"]] == list(checks)


@pytest.mark.parametrize(
    ("days", "state", "text"), [(-1, "problem", "expired on"), (10, "warning", "renew it"), (300, "ok", "valid until")]
)
def test_certificates(folder: Path, days: float, state: str, text: str) -> None:
    certificate(folder / "ca.crt", days)
    assert (found(folder)["authority"].state, text in found(folder)["authority"].text) == (state, True)


def test_permissions(folder: Path) -> None:
    (folder / "party").chmod(0o640)
    (folder / "state").mkdir(mode=0o755)
    checks = found(folder)
    assert "has mode 640, so that other users may use it; chmod 600" in checks["key"].text
    assert "has mode 755" in checks["folder"].text
    assert (checks["key"].state, checks["folder"].state) == ("problem", "problem")


def test_the_ledger(folder: Path) -> None:
    rules = load_policy(folder / "policy.toml")
    server = HostileServer(Party(folder / "state", rules, Quadratic()), zeros(DIMENSION))
    server.ask()
    server.ask()
    assert found(folder)["ledger"].state == "warning", "there is no witness"
    (folder / "policy.toml").write_text("epsilon = 0.1\n")
    assert "is used up" in found(folder)["ledger"].text
    ledger = folder / "state" / FILE
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert found(folder)["ledger"].state == "problem"
    assert "restore the ledger from a copy" in found(folder)["ledger"].text


def test_the_disk_space_of_all_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of terms has several runs, and a model may be in double precision."""
    terms = new_terms(folder / "app", {"own": folder / "party.pub"}, {"rounds": 2})
    (folder / "terms").mkdir()
    for name, dtype, itemsize in (("one", "float32", 4), ("two", "float64", 8)):
        own = terms.parties[0]
        agreed = dataclasses.replace(own.agreed, parameters=10**8 // itemsize, dtype=dtype)
        changed = dataclasses.replace(terms, parties=(dataclasses.replace(own, agreed=agreed),))
        changed.save(folder / "terms" / f"{name}.json")
    with (folder / "party.toml").open("a") as file:
        file.write('terms = "terms"\n')
    needed = LEAST_DISK + 2 * 10**8 * 8  # eight vectors for each run
    for free, state in ((needed - 1, "problem"), (needed, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert found(folder)["disk space"].state == state


def test_a_full_disk_a_wrong_table_and_a_broken_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    (folder / "patients.csv").write_text("age,ill\nold,0\n")
    checks = found(folder)
    assert "1 MiB left" in checks["disk space"].text
    assert "line 2, column 'age': 'old' is not a number" in checks["data"].text
    forget_app()
    (folder / "app" / "learning" / "task.py").write_text("raise RuntimeError('not\\nyet')")
    assert found(folder)["app"].text == "RuntimeError: not yet"
