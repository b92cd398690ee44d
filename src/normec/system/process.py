"""Which process this is, told apart from every process that it was forked from.

A process number alone does not do: a child may have its parent's in another namespace, and numbers come round again.
"""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def process_identity() -> tuple[int, int]:
    """(how many forks lie behind this process, its number)."""
    return _forks, os.getpid()
