"""Commands under the real torchrun, which is forked and forks its ranks, or starts from nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..cli.command import completed
from ..support.forks import ROOT, TORCHRUN
from ..support.waiting import LIMIT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def words(ranks: int, *arguments: str, max_restarts: int = 0) -> list[str]:
    """What follows `python` on a torchrun command line: `-m MODULE …` or a script, and arguments."""
    how = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    return [*TORCHRUN, *how, *arguments]


def torchrun(ranks: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return completed(*words(ranks, *arguments), cwd=cwd)


def torchrun_from_nothing(ranks: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words(ranks, *arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
