"""Certificates that Python's own TLS accepts for the hosts they name, and for no others."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from normec.errors import UsageError
from normec.federation.local import certificates


def handshake(files: certificates.ServerCertificate, host: str) -> None:
    """A server and a client in one process, over a pair of sockets."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=str(files.authority))
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as wrapped:
                wrapped.recv(1)
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=host) as wrapped:
            wrapped.send(b"x")
    finally:
        here.close()
        thread.join()


def test_good_for_the_named_hosts_only(tmp_path: Path) -> None:
    files = certificates.make_server(tmp_path / "a", ("127.0.0.1", "server.example"))
    handshake(files, "127.0.0.1")
    handshake(files, "server.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, "other.example")
    other = certificates.make_server(tmp_path / "b", ("127.0.0.1",))
    mixed = certificates.ServerCertificate(other.authority, files.certificate, files.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(mixed, "127.0.0.1")


def test_made_once_and_kept_secret(tmp_path: Path) -> None:
    files = certificates.make_server(tmp_path)
    before = files.certificate.read_bytes()
    assert certificates.make_server(tmp_path).certificate.read_bytes() == before
    key = tmp_path / "party"
    public = certificates.make_key(key)
    assert certificates.make_key(key) == public
    for secret in (files.key, key):
        assert secret.stat().st_mode & 0o077 == 0
    line = serialization.load_ssh_public_key((tmp_path / "party.pub").read_bytes())
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert line.public_bytes(*form) == public


def test_expired_certificates_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(certificates, "DAYS", 0)
        expired = certificates.make_server(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(expired, "127.0.0.1")
    handshake(certificates.make_server(tmp_path), "127.0.0.1")


def test_a_key_that_cannot_be_used_is_named_and_kept(tmp_path: Path) -> None:
    key = tmp_path / "party"
    key.write_text("a key of another kind\n")
    with pytest.raises(UsageError, match=f"{key} is not a private key in OpenSSH format"):
        certificates.make_key(key)
    assert key.read_text() == "a key of another kind\n"
