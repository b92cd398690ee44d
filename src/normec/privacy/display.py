"""ε and δ as they are shown to people: rounded up."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any


def shown_epsilon(value: Any, digits: int = 4) -> str:
    """ε with a few digits, rounded up: never understated by more than a part in 10¹², as floating-point sums are."""
    if not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "∞"
    exact = Decimal(f"{value:.12g}")  # the last digits are those of floating-point sums
    return f"{exact.normalize(Context(prec=digits, rounding=ROUND_CEILING)):f}"


def shown_delta(value: float, digits: int = 6) -> str:
    """δ with a few digits, rounded up, because a guarantee at a smaller δ would have a larger ε.

    Example:
        >>> shown_delta(1 / 30000), shown_delta(1e-5)
        ('3.33334e-05', '1e-05')
    """
    return f"{float(Decimal(f'{value:.12g}').normalize(Context(prec=digits, rounding=ROUND_CEILING))):.{digits}g}"
