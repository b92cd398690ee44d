"""The communicator of a distributed job: torch.distributed, with gloo on CPUs and NCCL on GPUs.

Tensors are sent as they are, other values as JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError
from ..privacy.hash_chain import LedgerDamaged, LedgerInUse
from .rank_status import RankStatus

Value = TypeVar("Value")
_SHARED = (UsageError, OSError, LedgerDamaged, LedgerInUse)  # errors of rank 0 that are raised on every rank


class TorchCommunicator:
    """A `Communicator` over all processes of the default process group."""

    def __init__(self, device: torch.device, status: RankStatus) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device, self._status = device, status

    def local_clients(self, clients: int) -> range:
        return self._share(clients, self.rank)

    def _share(self, clients: int, rank: int) -> range:
        least, more = divmod(clients, self.size)
        first = rank * least + min(rank, more)
        return range(first, first + least + (rank < more))

    def sum(self, part: Tensor) -> Tensor:
        return self.sum_async(part)()

    def sum_async(self, part: Tensor) -> Callable[[], Tensor]:
        part = part.contiguous()
        with self._collective():
            work = dist.all_reduce(part, async_op=True)

        def wait() -> Tensor:
            with self._collective():
                if work is not None:
                    work.wait()
            return part

        return wait

    def max(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        with self._collective():
            dist.all_reduce(part, dist.ReduceOp.MAX)
        return part

    def on_rank_zero(self, action: Callable[[], Value]) -> Value:
        reply: dict[str, Any] = {}
        raised: Exception | None = None
        if self.rank == 0:
            try:
                reply = {"value": action()}
            except _SHARED as error:
                kind = next(number for number, kind in enumerate(_SHARED) if isinstance(error, kind))
                reply, raised = {"kind": kind, "error": str(error)}, error
        data = json.dumps(reply).encode() if self.rank == 0 else b""
        length = torch.tensor([len(data)], device=self._device)
        with self._collective():
            dist.broadcast(length, 0)
        held = self._bytes(data, int(length))
        with self._collective():
            dist.broadcast(held, 0)
        if raised is not None:
            raise raised
        reply = json.loads(held.cpu().numpy().tobytes())
        if "error" in reply:
            raise _SHARED[reply["kind"]](reply["error"])
        value: Value = reply["value"]
        return value

    def all_gather(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(lengths, torch.tensor([len(data)], device=self._device))
        longest = max(int(length) for length in lengths)
        parts = [torch.empty(longest, dtype=torch.uint8, device=self._device) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(parts, self._bytes(data, longest))
        return [
            json.loads(part.cpu().numpy()[: int(length)].tobytes()) for part, length in zip(parts, lengths, strict=True)
        ]

    def gather_rows(self, rows: Tensor, clients: int) -> Tensor | None:
        if self.rank:
            with self._collective():
                dist.send(_raw(rows).to(self._device), 0)
            return None
        table = torch.empty(clients, *rows.shape[1:], dtype=rows.dtype)
        for rank in range(self.size):
            own = self._share(clients, rank)
            part = table[own.start : own.stop]
            if rank == 0:
                part.copy_(rows)
                continue
            received = _raw(part) if self._device.type == "cpu" else _raw(part).to(self._device)
            with self._collective():
                dist.recv(received, rank)
            if received.device != part.device:
                _raw(part).copy_(received)
        return table

    def scatter_rows(self, table: Tensor | None, own: Tensor) -> Tensor:
        if self.rank:
            received = torch.empty_like(own, device=self._device)
            with self._collective():
                dist.recv(_raw(received), 0)
            return own.copy_(received)
        if table is None:
            raise ValueError("rank 0 must pass the table")
        for rank in range(1, self.size):
            share = self._share(len(table), rank)
            part = table[share.start : share.stop].to(own.dtype)
            with self._collective():
                dist.send(_raw(part).to(self._device), rank)
        return own.copy_(table[: len(own)])

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn the failure of a collective call into an error that names the rank at fault.

        A sum over fewer ranks than before would have less noise than was paid for, so another group is refused.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (self.rank, self.size):
            raise UsageError(
                f"this was rank {self.rank} of {self.size}, and is rank {rank} of {size} in another process group; "
                "make a new optimizer, or a new communicator, after the group was changed"
            )
        try:
            yield
        except RuntimeError as error:
            raise self._status.diagnose(error) from error

    def _bytes(self, data: bytes, length: int) -> Tensor:
        held = torch.zeros(length, dtype=torch.uint8)
        if data:
            held[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return held.to(self._device)


def _raw(rows: Tensor) -> Tensor:
    """The bytes of the rows, so that rows of any dtype can be sent."""
    return rows.contiguous().flatten().view(torch.uint8)
