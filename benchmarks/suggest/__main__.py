"""python -m benchmarks.suggest: compare suggested settings with tuned ones."""

from __future__ import annotations

import sys

from normec.cli.app import run

from .commands import app

if __name__ == "__main__":
    sys.exit(run(commands=app))
