"""The versions of the packages on which a run depends, at a party and at the server."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from ... import __version__

SAME = ("normec", "flwr")  # other versions may compute or send something else
_PACKAGES = ("torch", "flwr")


def versions() -> dict[str, str]:
    """The versions on this machine, by package."""
    found = {"python": platform.python_version(), "normec": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def differing(theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The packages whose versions differ, with the version here and the one on the other side."""
    return {name: (own, theirs[name]) for name, own in versions().items() if theirs.get(name, own) != own}
