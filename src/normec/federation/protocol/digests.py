"""The chain of a party's messages: both sides know by one word that they speak of the same ones."""

from __future__ import annotations

import hashlib

from .wire import Array


def chained(previous: str, step: int, message: Array) -> str:
    """SHA-256 of the chain so far, the step, and the message's bytes."""
    digest = hashlib.sha256(f"{previous}/{step}/{message.dtype.str}/".encode())
    digest.update(message.tobytes())
    return digest.hexdigest()
