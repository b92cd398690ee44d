"""The command in processes of its own: forked where Python and torch are already loaded, or started from nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..support.forks import ENVIRONMENT, Fork, end_with_us

COMMAND = [sys.executable, "-m", "normec"]


def normec(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return completed("-m", "normec", *arguments, cwd=cwd)


def completed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a forked Python program to its end: the path of a script or `-m` and a module, and arguments."""
    process = Fork(words, cwd)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the command from nothing, as a user does; it ends when the tests end, however they end."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_us,
    )
