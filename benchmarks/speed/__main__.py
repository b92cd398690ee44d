"""python -m benchmarks.speed: measure the cost of a round."""

from __future__ import annotations

import sys

from normec.cli.app import run
from normec.system.processes import exit_with_parent, keep_freed_memory

from .commands import app

if __name__ == "__main__":
    exit_with_parent()
    keep_freed_memory()
    sys.exit(run(commands=app))
