"""What the parties of a test share, because they are in one process."""

from __future__ import annotations

import functools

import pytest

from normec.federation.secure_sum import history, keys, party, server


@pytest.fixture(autouse=True)
def checked_once(monkeypatch: pytest.MonkeyPatch) -> functools._lru_cache_wrapper[bool]:
    """Every party checks the same signatures as the others; here each is checked once, which is a third of the work."""
    cached = functools.cache(keys.signed_by)
    for module in (history, party, server):
        monkeypatch.setattr(module, "signed_by", cached)
    return cached
