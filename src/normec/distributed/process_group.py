"""Joining and leaving the process group of a job that torchrun or `normec train --processes` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Import this before a group is created. The default arguments of its functions hold the group that exists at import,
# so a later import (by the first optimizer) would keep the group alive. Its threads would outlive
# `destroy_process_group` and might abort the interpreter at exit. This does not help if `init_process_group` is called
# before this import.
import torch.distributed.nn.functional

from ..errors import RankLost, UsageError, positive
from ..system.processes import PARENT
from ..training.communicator import Communicator, SingleProcess
from .rank_status import RankStatus, attempt_store
from .torch_communicator import TorchCommunicator

DEFAULT_TIMEOUT = 600.0
_statuses: list[RankStatus] = []  # the status of the joined job, which optimizers use


def launched() -> bool:
    """Whether this process is one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join(device: str | torch.device = "cpu", timeout: float = DEFAULT_TIMEOUT) -> Iterator[Communicator]:
    """Join the ranks of this job, from torchrun's environment variables; `SingleProcess` if there is only one process.

    On a GPU each rank of a host takes the device of its local number.

    Args:
        device: Where the ranks compute, "cpu" or "cuda".
        timeout: The seconds to wait for a rank. One that does not answer ends the job, with its name in the error.

    Yields:
        The ranks, for `Compute(communicator=…)`.

    Raises:
        UsageError: A host has fewer GPUs than ranks.
        RankLost: The ranks did not find one another.

    Example:
        >>> with join() as communicator:  # outside of torchrun
        ...     print(communicator.rank, communicator.size)
        0 1
    """
    positive(timeout=timeout)
    device = torch.device(device)
    if not launched():
        yield SingleProcess()
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"local rank {local} has no GPU: this host has {torch.cuda.device_count()}; start fewer ranks"
            )
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    limit = timedelta(seconds=timeout)
    patience = timedelta(seconds=max(timeout, DEFAULT_TIMEOUT))  # hosts may start at different times
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store = attempt_store(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
        )
        store.set_timeout(limit)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"the ranks could not connect: {' '.join(str(error).split())[:300]}") from error
    status = RankStatus(store, rank, size, timeout)
    _statuses.append(status)
    try:
        yield TorchCommunicator(device, status)
    except BaseException as error:
        status.record_exit(_reason(error))
        raise
    finally:
        _statuses.remove(status)
        dist.destroy_process_group()


def _reason(error: BaseException) -> str:
    """Why this rank ends, in words that other ranks may see.

    What an error says may quote a record. Ranks that `normec train --processes` has started belong to one user of one
    machine; others may lie on machines of others, which learn the kind of the error alone.
    """
    kind = type(error).__name__
    return str(error) or kind if PARENT in os.environ else kind


def rank_status() -> RankStatus:
    """Return the status of this process's job, whether `join` or the user's `init_process_group` joined it."""
    if _statuses:
        return _statuses[-1]
    return RankStatus(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), None)
