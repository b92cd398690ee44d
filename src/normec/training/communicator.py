"""Communication between the processes of a run.

The clients of a run are computed in one process, or they are divided among ranks that add up their sums. The training
loop is the same in both cases, and a `Communicator` is all that it knows of other processes. Clients have the same
numbers on every rank, so the random numbers of a client do not depend on the rank that computes it. All methods except
`local_clients` are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import UsageError
from ..problems.objective import Buffers

Value = TypeVar("Value")


class Communicator(Protocol):
    """The processes of one run. Rank 0 keeps the folder and the ledger, and decides."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def local_clients(self, clients: int) -> range:
        """Return the clients of this rank: a contiguous range; the sizes of the ranges differ by at most one."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of `part` over all ranks; `part` may be overwritten."""
        ...

    def sum_async(self, part: Tensor) -> Callable[[], Tensor]:
        """Start `sum`; the function that is returned waits for its result."""
        ...

    def max(self, part: Tensor) -> Tensor:
        """Return the elementwise maximum of `part` over all ranks; `part` may be overwritten."""
        ...

    def on_rank_zero(self, action: Callable[[], Value]) -> Value:
        """Run `action` on rank 0 and return its result, which must be plain JSON, on every rank.

        A UsageError, an OSError, or what is wrong with a ledger is raised on every rank.
        """
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which must be plain JSON, in the order of the ranks."""
        ...

    def gather_rows(self, rows: Tensor, clients: int) -> Tensor | None:
        """Return the table of all clients' rows in host memory on rank 0, and None on the other ranks."""
        ...

    def scatter_rows(self, table: Tensor | None, own: Tensor) -> Tensor:
        """Fill `own` with this rank's rows of the table that rank 0 holds, and return it."""
        ...


def check_agreement(
    communicator: Communicator, facts: dict[str, Any], cure: str = "start all with the same settings and data"
) -> None:
    """Raise the same UsageError on every rank if `facts`, which must be plain JSON, differ between the ranks."""
    gathered = communicator.all_gather(json.loads(json.dumps(facts)))
    for key in sorted(set().union(*gathered)):
        values = [other.get(key) for other in gathered]
        unlike = [rank for rank, value in enumerate(values) if value != values[0]]
        if unlike:
            raise UsageError(
                f"the ranks do not agree: {key} is {values[0]!r} on rank 0 and {values[unlike[0]]!r} on rank "
                f"{unlike[0]}; {cure}"
            )


class SingleProcess:
    """The communicator of a run in one process."""

    rank, size = 0, 1

    def local_clients(self, clients: int) -> range:
        return range(clients)

    def sum(self, part: Tensor) -> Tensor:
        return part

    def sum_async(self, part: Tensor) -> Callable[[], Tensor]:
        return lambda: part

    def max(self, part: Tensor) -> Tensor:
        return part

    def on_rank_zero(self, action: Callable[[], Value]) -> Value:
        return action()

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_rows(self, rows: Tensor, clients: int) -> Tensor | None:  # noqa: ARG002
        return rows

    def scatter_rows(self, table: Tensor | None, own: Tensor) -> Tensor:
        if table is not None:
            own.copy_(table)
        return own


def local_part(drawn: Tensor | None, own: range, clients: int) -> Tensor | None:
    """Return the drawn clients (None: all) that belong to this rank; None if they are all the clients there are."""
    if len(own) == clients:
        return drawn
    return torch.arange(own.start, own.stop) if drawn is None else drawn[(drawn >= own.start) & (drawn < own.stop)]


def gather_buffers(buffers: Buffers, communicator: Communicator) -> Buffers:
    """Return the buffers of all clients on every rank; each rank contributes the rows of its own clients."""
    if communicator.size == 1 or not buffers:
        return buffers
    whole = {}
    for name, rows in buffers.items():
        own, known = communicator.local_clients(len(rows)), torch.zeros_like(rows)
        known[own.start : own.stop] = rows[own.start : own.stop]
        whole[name] = communicator.sum(known)
    return whole
