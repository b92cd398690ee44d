"""python -m benchmarks.speed: measure the cost of a round."""

from __future__ import annotations

import sys

from normec.cli.app import run
from normec.system.processes import keep_freed_memory, tie_to_parent

from .commands import app

if __name__ == "__main__":
    tie_to_parent()
    keep_freed_memory()
    sys.exit(run(commands=app))
