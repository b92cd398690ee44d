"""Joining the ranks of a job that torchrun (or `normec train --processes`) has started, and leaving them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Before any group is made: defaults of its functions are the group of that moment, so that a later import (the first
# optimizer's) keeps it. Its threads then outlive `destroy_process_group`, and may abort the interpreter at its end.
# Who calls `init_process_group` before importing this package is not helped.
import torch.distributed.nn.functional

from ..errors import RankLost, UsageError, positive
from ..training.communicator import Communicator, SingleProcess
from .rank_status import RankStatus, attempt_store
from .torch_communicator import TorchCommunicator

DEFAULT_TIMEOUT = 600.0
_statuses: list[RankStatus] = []  # of the job this process is in, so that optimizers find it


def launched() -> bool:
    """Whether this process is one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join(device: str | torch.device = "cpu", timeout: float = DEFAULT_TIMEOUT) -> Iterator[Communicator]:
    """The ranks of this job, as torchrun's environment names them; `SingleProcess` where there is one process.

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
            raise UsageError(f"local rank {local} has no GPU: this host has {torch.cuda.device_count()}; start fewer")
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    limit = timedelta(seconds=timeout)
    patience = timedelta(seconds=max(timeout, DEFAULT_TIMEOUT))  # hosts start at their own pace
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store = attempt_store(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
        )
        store.set_timeout(limit)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"the ranks did not find one another: {' '.join(str(error).split())[:300]}") from error
    status = RankStatus(store, rank, size, timeout)
    _statuses.append(status)
    try:
        yield TorchCommunicator(device, status)
    except BaseException as error:
        status.record_exit(str(error) or type(error).__name__)
        raise
    finally:
        _statuses.remove(status)
        dist.destroy_process_group()


def rank_status() -> RankStatus:
    """Of the job this process is in, joined here or by the user's own `init_process_group`."""
    if _statuses:
        return _statuses[-1]
    return RankStatus(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), None)
