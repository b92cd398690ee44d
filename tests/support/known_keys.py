"""Keys of secure noise that follow from the name of the running test.

What a test says of the noise's statistics then holds always or never; otherwise it would fail once in a while. A
process that a test forks has other keys than the test, and one that it starts has the system's.
"""

from __future__ import annotations

import hashlib
import os
from types import SimpleNamespace

from normec.privacy import keystream


class KnownKeys:
    """Takes the place of the system's source of random bytes in `normec.privacy.keystream`."""

    def __init__(self) -> None:
        self._owner, self._test, self._drawn = os.getpid(), "", 0
        keystream.os = SimpleNamespace(urandom=self._key)  # type: ignore[attr-defined]

    def begin(self, test: str) -> None:
        """Begin anew for a test."""
        self._test, self._drawn = test, 0

    def _key(self, size: int) -> bytes:
        self._drawn += 1
        fork = "" if os.getpid() == self._owner else f" {os.getpid()}"
        return hashlib.shake_256(f"{self._test} {self._drawn}{fork}".encode()).digest(size)
