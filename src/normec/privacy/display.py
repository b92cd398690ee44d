"""ε as it is shown to people: rounded up."""

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
