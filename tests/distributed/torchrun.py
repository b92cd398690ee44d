"""Commands under the real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def command(ranks: int, *arguments: str, max_restarts: int = 0) -> list[str]:
    """A torchrun command line: `-m MODULE …` or a script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "--max-restarts", str(max_restarts), *arguments]


def torchrun(ranks: int, *arguments: str, cwd: Path, max_restarts: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ranks, *arguments, max_restarts=max_restarts),
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
