"""Combinations of settings in which every pair of values occurs, where all of them would take too long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any


def combined(device: str, *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """All combinations of the axes' values on a GPU; on a CPU, where kernels are interpreted, the pairs of values."""
    places = [range(len(axis)) for axis in axes]
    for chosen in pairwise(*places) if device == "cpu" else product(*places):
        yield tuple(axis[place] for axis, place in zip(axes, chosen, strict=True))


def pairwise(*axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations that have every pair of values of two axes, chosen greedily: always the one with most new pairs."""

    def pairs(chosen: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), 2))

    everything = {chosen: pairs(chosen) for chosen in product(*axes)}
    left, found = set().union(*everything.values()), []
    while left:
        best = max(everything, key=lambda chosen: len(everything[chosen] & left))
        left -= everything[best]
        found.append(best)
    return found
