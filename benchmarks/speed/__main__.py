"""python -m benchmarks.speed: what a round costs, beside a floor, a hand-written loop and other libraries."""

from __future__ import annotations

import sys

import typer

from normec.cli import app as cli
from normec.system.processes import keep_freed_memory, tie_to_parent

from .command import bench

app = typer.Typer(name="python -m benchmarks.speed", rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(bench)

if __name__ == "__main__":
    tie_to_parent()
    keep_freed_memory()
    sys.exit(cli.run(commands=app))
