"""Argument checks: every formula takes floats or arrays that broadcast, and refuses values outside its conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

Array = npt.NDArray[np.float64]
Numbers = float | Array
Value = Any  # a float if every argument is one, else an array

SLACK = 1e-9  # relative, so that a step size equal to the limit does not fail because of rounding


def positive(**values: Numbers) -> None:
    for name, value in values.items():
        _refuse_where(~(np.isfinite(value) & (np.asarray(value) > 0)), f"{name} must be > 0 and finite", value)


def non_negative(**values: Numbers) -> None:
    for name, value in values.items():
        _refuse_where(~(np.isfinite(value) & (np.asarray(value) >= 0)), f"{name} must be >= 0 and finite", value)


def whole(least: int, **values: Numbers) -> None:
    for name, value in values.items():
        numbers = np.asarray(value, dtype=np.float64)
        _refuse_where(
            ~((numbers >= least) & (numbers == np.floor(numbers))), f"{name} must be whole, >= {least}", value
        )


def below(limit: Numbers, what: str, *, strict: bool = False, **values: Numbers) -> None:
    """Refuse a `value` above `limit`, which `what` explains."""
    for name, value in values.items():
        number, bound = np.broadcast_arrays(np.asarray(value, dtype=np.float64), np.asarray(limit, dtype=np.float64))
        wrong = ~(number < bound) if strict else ~(number <= bound * (1 + SLACK) + 1e-300)
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0])
            sign = "<" if strict else "at most"
            raise UsageError(f"{name} must be {sign} {what} = {bound[first]:.6g}, got {number[first]:.6g}")


def plain(value: Any) -> Value:
    """Convert an array with a single number to a float."""
    found = np.asarray(value, dtype=np.float64)
    return float(found) if found.ndim == 0 else found


def root(value: Any) -> Any:
    return np.sqrt(np.asarray(value, dtype=np.float64))


def _refuse_where(wrong: Any, rule: str, value: Numbers) -> None:
    if np.any(wrong):
        first = np.asarray(value, dtype=np.float64)[np.asarray(wrong)].flat[0]
        raise UsageError(f"{rule}, got {first:.6g}")
