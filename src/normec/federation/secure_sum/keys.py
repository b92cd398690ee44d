"""The keys of a party: a long-term Ed25519 identity that signs, and X25519 pairs that last for one attempt.

All primitives are those of `cryptography`. Secrets that are shared among the parties are seeds of 16 bytes, from which
HKDF-SHA256 derives keys of 32 bytes. X25519 itself has a security of 128 bits, so longer seeds would gain nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Self

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ...errors import UsageError
from ...system.files import read_bytes, write_atomic

SEED = 16  # bytes of a secret that is shared
KEY = 32  # bytes of a key, of a digest and of a commitment
SIGNATURE = 64
TAG = 16  # bytes that AES-GCM adds
NONCE = 12
_PROTOCOL = b"normec secure sum 1"
_LARGEST_KEY_FILE = 4096


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = KEY) -> bytes:
    """HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), length, salt, info).derive(secret)


def derive(secret: bytes, terms: bytes, purpose: str, *context: int) -> bytes:
    """A key for one purpose: no two purposes, runs, rounds, attempts or pairs of parties have the same."""
    return hkdf(secret, terms, _encoded(purpose, *context))


def digest(purpose: str, *content: bytes) -> bytes:
    """SHA-256 of byte strings, for one purpose."""
    return hashlib.sha256(_encoded(purpose, *content)).digest()


def commitment(seed: bytes, terms: bytes, attempt: int, party: int) -> bytes:
    """A commitment to a seed, which hides it, because a seed has 128 random bits."""
    return derive(seed, terms, "commitment", attempt, party)


def new_seed() -> bytes:
    return secrets.token_bytes(SEED)


def seal_once(key: bytes, text: bytes) -> bytes:
    """Encrypt the only text that a key is ever used for."""
    return AESGCM(key).encrypt(bytes(NONCE), text, None)


def unseal_once(key: bytes, sealed: bytes) -> bytes | None:
    """Decrypt what `seal_once` encrypted; None if it was changed or made with another key."""
    try:
        return AESGCM(key).decrypt(bytes(NONCE), sealed, None)
    except InvalidTag:
        return None


class KeyPair:
    """An X25519 pair (RFC 7748) from 32 secret bytes."""

    def __init__(self, private: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes, terms: bytes, attempt: int, party: int) -> Self:
        return cls(derive(seed, terms, "key pair", attempt, party))

    def shared(self, public: bytes) -> bytes | None:
        """The secret that this pair shares with the owner of a public key; None for the few keys that share none."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            return None


def usable(public: bytes) -> bool:
    """Whether a public key leads to a secret, which keys of low order do not."""
    return KeyPair(secrets.token_bytes(KEY)).shared(public) is not None


class Identity:
    """The long-term key of a party, with which it signs and from which it derives the key of its deposits."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the key from a PEM file. Raises `UsageError` if there is none."""
        try:
            content = read_bytes(path, _LARGEST_KEY_FILE)
        except FileNotFoundError:
            raise UsageError(f"there is no key at {path}; `normec federation identity` creates one") from None
        try:
            key = load_pem_private_key(content, None)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a private key in PEM without a password: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(f"{path} holds a key of another kind; a party of a secure sum signs with Ed25519")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key to a PEM file that only its owner can read. Raises `UsageError` if there is a file already."""
        if path.exists():
            raise UsageError(f"{path} exists; a key is never replaced, because the others know this party by it")
        write_atomic(path, self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)

    def sign(self, purpose: str, content: bytes) -> bytes:
        return self._key.sign(_encoded(purpose, content))

    def deposit_key(self, terms: bytes) -> bytes:
        """The key under which this party seals its deposits in one run."""
        return derive(self._key.private_bytes_raw(), terms, "deposit")


def signed_by(public: bytes, purpose: str, content: bytes, signature: bytes) -> bool:
    """Whether the owner of a public key signed this content for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _encoded(purpose, content))
    except (InvalidSignature, ValueError):
        return False
    return True


def _encoded(purpose: str, *parts: bytes | int) -> bytes:
    """The parts as one byte string, from which they can be told apart."""
    return msgspec.msgpack.encode((_PROTOCOL, purpose, *parts))
