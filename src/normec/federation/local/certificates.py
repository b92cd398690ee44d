"""Certificates and keys for `normec federation local`: an authority, a server's certificate, and party key pairs.

On real machines the owner of the server creates certificates with the tools of the organisation, and every party
creates its own key and shares only the public half (docs/guides/federation.md).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...system.files import private_folder, write_atomic
from ..flower.supernode import read_private_key

DAYS = 365


@dataclass(frozen=True)
class ServerCertificate:
    """The certificate files of a SuperLink. Every party and user trusts `authority`."""

    authority: Path
    certificate: Path
    key: Path


def make_server(folder: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> ServerCertificate:
    """Create an authority and a certificate for `hosts` in a folder, unless they exist and are still valid."""
    found = ServerCertificate(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    if all(path.exists() for path in (found.authority, found.certificate, found.key)) and _valid(found.certificate):
        return found
    private_folder(folder)
    authority_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer, subject = _name("normec federation authority"), _name(hosts[0])
    authority = (
        _certificate(issuer, issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    certificate = (
        _certificate(subject, issuer, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    write_atomic(found.key, secret, private=True)
    for path, signed in ((found.certificate, certificate), (found.authority, authority)):
        write_atomic(path, signed.public_bytes(serialization.Encoding.PEM))
    return found  # the key of the authority is not kept, so it can never sign anything else


def make_key(path: Path) -> bytes:
    """Create a party's key in `path` and `path`.pub, in OpenSSH format. Returns the public key as Flower stores it.

    An existing key is kept, because it identifies the party. Raises `UsageError` if it cannot be read.
    """
    if path.exists():
        private = read_private_key(path)
    else:
        private_folder(path.parent)
        private = ec.generate_private_key(ec.SECP384R1())
        openssh = serialization.PrivateFormat.OpenSSH
        plain = serialization.NoEncryption()
        write_atomic(path, private.private_bytes(serialization.Encoding.PEM, openssh, plain), private=True)
    public = private.public_key()
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomic(path.with_name(path.name + ".pub"), line + b"\n")
    stored: bytes = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return stored


def _valid(certificate: Path) -> bool:
    """Whether a certificate, which was made together with its authority, is intact and valid for another day."""
    try:
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except ValueError:
        return False
    return ends > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(**on: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    flags: dict[str, Any] = {name: on.get(name, False) for name in names}
    return x509.KeyUsage(**flags)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
