"""Format numbers and names for readers."""

from __future__ import annotations

import math
import re
from typing import Any

from ..algorithms.catalogue import CATALOGUE


def number(value: Any, digits: int = 4) -> str:
    """A number with a few digits; empty for a missing value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e") if math.isfinite(value) else "not finite"


def percent(value: Any, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %" if isinstance(value, int | float) and math.isfinite(value) else ""


def seconds(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(count: Any) -> str:
    """Bytes."""
    if not isinstance(count, int | float):
        return ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


SYMBOLS = {"alpha": "α", "beta": "β", "tau": "τ", "eta": "η"}  # the paper's names of settings


def setting(name: str) -> str:
    """The name of a setting for readers: the symbol of the paper, or words."""
    return SYMBOLS.get(name, name.replace("_", " "))


def method(name: str) -> str:
    return CATALOGUE[name].title if name in CATALOGUE else name


def sentence(text: str) -> str:
    """With a capital at the beginning and a full stop at the end."""
    text = re.sub(r"[ \t\n]+", " ", text).strip()  # a no-break space stays
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def listed(words: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
