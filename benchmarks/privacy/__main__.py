"""python -m benchmarks.privacy: compare methods under the same privacy guarantee."""

from __future__ import annotations

import sys

from normec.cli.app import run

from .commands import app

if __name__ == "__main__":
    sys.exit(run(commands=app))
