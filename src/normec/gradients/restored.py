"""Keeps what code of the user's own saw in some records from the others, where every record is clipped.

A model may assign what it saw to a buffer or an attribute, and use it much later, when no check compares gradients any
more. So whatever such code has assigned while it computed a block of records is undone afterwards. Within a block vmap
parts the records. Transforms and augmentations that are called without vmap forget what they saw after every record.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..data.augment import treats_records_alone

if TYPE_CHECKING:
    from ..problems.problem import Problem


@contextmanager
def restored(*parts: object) -> Iterator[None]:
    """Restore the attributes and buffers of models, losses and transforms, and the lists and dicts among them.

    What is changed in place inside of other objects, or in global variables, stays changed.
    """
    owners = [owner for part in parts for owner in _owners(part)]
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    contents = [(value, value.copy()) for _, held in before for value in held.values() if _is_container(value)]
    try:
        yield
    finally:
        for now, held in [*before, *contents]:
            now.clear()
            now.extend(held) if isinstance(now, list | deque) else now.update(held)


def forgetful(problem: Problem) -> Problem:
    """Return the problem with a transform and an augmentation that keep nothing from one call to the next."""
    found: Any = copy.copy(problem)
    if not treats_records_alone(found.augment):
        found.augment = _Forgetful(found.augment)
    if not treats_records_alone(found.transform):
        found.transform = _Forgetful(found.transform)
    forgets: Problem = found
    return forgets


class _Forgetful:
    def __init__(self, part: Any) -> None:
        self._part, self.draws = part, getattr(part, "draws", 0)

    def __call__(self, *given: Tensor) -> Tensor:
        with restored(self._part):
            found: Tensor = self._part(*given)
        return found


def _owners(part: object) -> Iterator[Any]:
    """Yield the objects behind a part that have attributes: modules, the object of a bound method, a function."""
    part = part.func if isinstance(part, partial) else part
    part = getattr(part, "__self__", part)
    if isinstance(part, nn.Module):
        yield from part.modules()
    elif hasattr(part, "__dict__") and not isinstance(part, type):
        yield part


def _is_container(value: object) -> bool:
    return isinstance(value, list | deque | dict | set)
