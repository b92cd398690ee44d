"""Tables on stdout, as wide as they need to be where no terminal sets the width."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import printable


def show(rows: Sequence[Sequence[str]], columns: Sequence[str] = (), title: str = "") -> None:
    """Print `rows` under `columns`; columns of numbers, named with a leading '>', are set to the right."""
    table = Table(title=_text(title) if title else None, show_header=bool(columns))
    for name in columns:
        head = _text(name.removeprefix(">"))
        table.add_column(head, justify="right" if name.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _text(cell: str) -> Text:
    """A cell as it is: brackets are not markup, and nothing in it steers the terminal."""
    return Text(printable(cell))


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
