"""Build HTML in which all text is escaped, unless it was built here."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Collection, Iterable
from typing import Any


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None | Iterable["Child"]
# Control characters but tab and line feed, halves of surrogate pairs (of file names that are not UTF-8), and marks that
# reorder the text around them.
NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


def e(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. Attributes: ``class_`` is class, ``aria_label`` is aria-label; True is set bare, None left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        named = key.rstrip("_").replace("_", "-")
        parts.append(named if value is True else f'{named}="{_escaped(str(value))}"')
    opened = f"<{' '.join(parts)}>"
    return Html(opened if name in VOID else f"{opened}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Children one after another, escaped where they are plain text."""
    return Html("".join(_text(child) for child in children))


def _escaped(text: str) -> str:
    """Text as HTML; control characters, and what is no character at all, become U+FFFD."""
    return html.escape(NO_TEXT.sub("\ufffd", text))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return _escaped(child)
    return "".join(_text(one) for one in child)


def data_block(identifier: str, value: Any) -> Html:
    """A value as JSON inside the page: read by scripts, never run as one."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{safe}</script>')


def plain(value: Any) -> Any:
    """What JSON can hold: six digits a number, None where it is not finite."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain(held) for held in value]
    return str(value)


def table(
    columns: Iterable[Child], rows: Iterable[Iterable[Child]], more: Collection[int] = (), **attributes: object
) -> Html:
    """A table in a box that scrolls by itself; a column named with a leading '>' holds numbers.

    The columns at the positions `more` have the class "more".
    """
    names = list(columns)
    numeric = [isinstance(name, str) and not isinstance(name, Html) and name.startswith(">") for name in names]
    classes = [
        " ".join(filter(None, ("number" if number else "", "more" if position in more else ""))) or None
        for position, number in enumerate(numeric)
    ]
    head = [
        e("th", name[1:] if number and isinstance(name, str) else name, scope="col", class_=kind)
        for name, number, kind in zip(names, numeric, classes, strict=True)
    ]
    body = [e("tr", [e("td", cell, class_=kind) for cell, kind in zip(row, classes, strict=True)]) for row in rows]
    inner = e("table", e("thead", e("tr", head)), e("tbody", body), **attributes)
    return e("div", inner, class_="scroll", tabindex="0", role="region", aria_label=attributes.get("aria_label"))
