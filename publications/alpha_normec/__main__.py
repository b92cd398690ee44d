"""python -m publications.alpha_normec: run the experiments of the paper, and draw its figures and tables."""

from __future__ import annotations

import sys

from normec.cli.app import run
from normec.system.processes import exit_with_parent, keep_freed_memory

from .commands import app

if __name__ == "__main__":
    exit_with_parent()
    keep_freed_memory()
    sys.exit(run(commands=app))
