"""A norm, a shortcut and ReLU in one go, where the norm knows how; and what came out of it used a second time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(x) + shortcut), which takes a GPU fewer passes over memory when done at once.

    A norm that can do so has a method `then_relu(x, shortcut)`, which returns None where it cannot after all.
    """
    at_once: Callable[[Tensor, Tensor | None], Tensor | None] | None = getattr(norm, "then_relu", None)
    found = at_once(x, shortcut) if at_once is not None else None
    if found is None:
        found = norm(x) if shortcut is None else norm(x) + shortcut
        found = F.relu(found)
    return found


def second(x: Tensor) -> Tensor:
    """x for a second use, whose slope its norm adds to the first one's itself where it knows how."""
    found: Tensor = getattr(x, "second", x)
    return found
