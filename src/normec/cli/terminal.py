"""Text from files and folders as a terminal may show it."""

from __future__ import annotations

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, surrogates, line and paragraph separators


def printable(text: str) -> str:
    r"""`text` on one line, every character that could steer a terminal or hide written as an escape such as \\x1b."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in HIDDEN else character for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
