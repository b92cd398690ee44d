"""What the owner of a party makes by hand, and apps that are loaded anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_ssh_key(path: Path) -> None:
    """Make the key pair of a party with OpenSSH: `path`, and `path` with the suffix .pub."""
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True)


def forget_app() -> None:
    """Forget the modules of an app that was loaded before, because all apps have the same module names."""
    for name in [name for name in sys.modules if name.split(".")[0] == "learning"]:
        del sys.modules[name]
