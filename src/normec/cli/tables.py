"""Tables on stdout, as wide as they need to be where no terminal sets the width."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def show(rows: Sequence[Sequence[str]], columns: Sequence[str] = (), title: str = "") -> None:
    """Print `rows` under `columns`; columns of numbers, named with a leading '>', are set to the right."""
    table = Table(title=title or None, show_header=bool(columns))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
