"""Combinations of settings in which every pair of values occurs, where all of them would take too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any


def combined(device: str, *axes: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """All combinations of the axes' values on a GPU; on a CPU, where kernels are interpreted, enough for all pairs."""
    return pairwise(*axes) if device == "cpu" else product(*axes)


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations that have every pair of values of two axes, chosen greedily: always the one with most new pairs.

    Where an axis does not change what the others do, they find what all combinations find.
    """

    def pairs(chosen: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), 2))

    everything = {chosen: pairs(chosen) for chosen in product(*(range(len(axis)) for axis in axes))}
    left, found = set().union(*everything.values()), list[tuple[Any, ...]]()
    while left:
        best = max(everything, key=lambda chosen: len(everything[chosen] & left))
        left -= everything[best]
        found.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
    return found
