"""Where the clients of a run live: in this process, or spread over ranks that add up their sums.

The round loop is one; a `World` is all it knows of other processes. Clients keep their numbers everywhere, so whatever
is drawn for a client does not depend on where it lives. Every call but `own` is made by all ranks together, in the same
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import UsageError
from ..problems.objective import Buffers

Said = TypeVar("Said")


class World(Protocol):
    """The processes of one run; rank 0 has the folder, the ledger and the last word."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def own(self, clients: int) -> range:
        """The clients that live here: neighbours, as many as elsewhere or one more."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Σ over ranks; `part` is used up."""
        ...

    def sum_later(self, part: Tensor) -> Callable[[], Tensor]:
        """`sum`, begun now; calling what is returned waits for it."""
        ...

    def largest(self, part: Tensor) -> Tensor:
        """The largest over ranks, entry by entry; `part` is used up."""
        ...

    def first(self, action: Callable[[], Said]) -> Said:
        """What rank 0 gets by `action`, plain JSON, said to all; its UsageError or OSError is raised everywhere."""
        ...

    def gather(self, said: Any) -> list[Any]:
        """What every rank says, plain JSON, in the order of ranks, known to all."""
        ...

    def collect(self, rows: Tensor, clients: int) -> Tensor | None:
        """The table of all clients' rows, on rank 0's host; None elsewhere."""
        ...

    def deal(self, table: Tensor | None, own: Tensor) -> Tensor:
        """This rank's rows of the table that rank 0 holds; `own` is a tensor of their shape, and is overwritten."""
        ...


def agree(world: World, told: dict[str, Any], cure: str = "start all with the same settings and data") -> None:
    """All ranks say the same of what their sums rest on, plain JSON; else every one raises the same UsageError."""
    said = world.gather(json.loads(json.dumps(told)))
    for key in sorted(set().union(*said)):
        values = [other.get(key) for other in said]
        unlike = [rank for rank, value in enumerate(values) if value != values[0]]
        if unlike:
            raise UsageError(
                f"the ranks do not agree: {key} is {values[0]!r} on rank 0 and {values[unlike[0]]!r} on rank "
                f"{unlike[0]}; {cure}"
            )


class Alone:
    """One process, where all clients live."""

    rank, size = 0, 1

    def own(self, clients: int) -> range:
        return range(clients)

    def sum(self, part: Tensor) -> Tensor:
        return part

    def sum_later(self, part: Tensor) -> Callable[[], Tensor]:
        return lambda: part

    def largest(self, part: Tensor) -> Tensor:
        return part

    def first(self, action: Callable[[], Said]) -> Said:
        return action()

    def gather(self, said: Any) -> list[Any]:
        return [said]

    def collect(self, rows: Tensor, clients: int) -> Tensor | None:  # noqa: ARG002
        return rows

    def deal(self, table: Tensor | None, own: Tensor) -> Tensor:
        if table is not None:
            own.copy_(table)
        return own


def here(drawn: Tensor | None, own: range, clients: int) -> Tensor | None:
    """Those of the drawn clients (None: of all) that live here; None where that is all of them."""
    if len(own) == clients:
        return drawn
    return torch.arange(own.start, own.stop) if drawn is None else drawn[(drawn >= own.start) & (drawn < own.stop)]


def whole(buffers: Buffers, world: World) -> Buffers:
    """All clients' buffers, on every rank, from those that each rank keeps up to date."""
    if world.size == 1 or not buffers:
        return buffers
    whole = {}
    for name, rows in buffers.items():
        own, known = world.own(len(rows)), torch.zeros_like(rows)
        known[own.start : own.stop] = rows[own.start : own.stop]
        whole[name] = world.sum(known)
    return whole
