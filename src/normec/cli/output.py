"""Output for terminals: tables, numbers, and text from files made safe to print."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

SHORT = 12  # the width up to which a column of a table is never cut
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, surrogates, line and paragraph separators


def printable(text: str) -> str:
    r"""Return `text` on one line; control and invisible characters are written as escapes such as \x1b."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in HIDDEN else character for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def show(rows: Sequence[Sequence[str]], columns: Sequence[str] = (), title: str = "", wrapped: bool = False) -> None:
    """Print a table of `rows` under `columns`; a column whose name starts with '>' is aligned to the right.

    Without a terminal the table is 160 characters wide. If the last column is `wrapped`, it may have several lines.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_text(title) if title else None, show_header=bool(columns))
    for number, name in enumerate(columns, 1):
        head, one_line = _text(name.removeprefix(">")), not (wrapped and number == len(columns))
        longest = max((len(row[number - 1]) for row in rows if len(row) >= number), default=0)
        table.add_column(
            head,
            justify="right" if name.startswith(">") else "left",
            no_wrap=one_line,
            min_width=longest if longest <= SHORT else None,
        )
    for row in rows:
        table.add_row(*map(_text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _text(cell: str) -> Text:
    """The cell as plain text: brackets are not markup, and no character controls the terminal."""
    from rich.text import Text

    return Text(printable(cell))


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
