"""python -m publications.alpha_normec: the paper's figures and tables, and its cells on its own data."""

from __future__ import annotations

import sys

from normec.cli import app as cli
from normec.system.processes import keep_freed_memory, tie_to_parent

from .figures.command import reproduce
from .replay.command import app

app.command("figures")(reproduce)

if __name__ == "__main__":
    tie_to_parent()
    keep_freed_memory()
    sys.exit(cli.run(commands=app))
