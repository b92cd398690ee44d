"""Where the clients' memories g_i live: one table ``[n, d]`` on the device, in host memory, or in a file."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError, one_of

Home = Literal["device", "host", "disk"]
HOMES: tuple[str, ...] = get_args(Home)


@dataclass(frozen=True)
class MemoryTable:
    """How the table is kept; a round touches the rows of the clients that take part, wherever they are.

    "host" and "disk" are for tables that outgrow the device: rows travel to it and back. "disk" is a file mapped into
    memory, so that what is not touched need not be in RAM. "bfloat16" halves the table; see `update.rounded`.
    """

    dtype: torch.dtype | None = None  # None: that of x
    home: Home = "device"

    def __post_init__(self) -> None:
        one_of(HOMES, memory_home=self.home)
        if self.dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise UsageError(f"memory_dtype must be bfloat16, float32 or float64, got {self.dtype}")

    def zeros(self, clients: int, like: Tensor, folder: Path | None) -> Tensor:
        """A table of zeros for n clients of dimension ``len(like)``."""
        dtype = self.dtype or like.dtype
        shape = (clients, len(like))
        if self.home == "device":
            return like.new_zeros(shape, dtype=dtype)
        if self.home == "host":
            return torch.zeros(shape, dtype=dtype)
        return _mapped(shape, dtype, folder)


def stateless(clients: int, like: Tensor) -> Tensor:
    """The table of a method without memory: one row of zeros, seen n times."""
    return like.new_zeros(1, len(like)).expand(clients, len(like))


def _mapped(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    size = shape[0] * shape[1]
    where = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
    while not where.is_dir():  # a run's folder appears only when its first gradients were found finite
        where = where.parent
    if (free := shutil.disk_usage(where).free) < size * dtype.itemsize:
        raise UsageError(f"memory_home 'disk' needs {size * dtype.itemsize} bytes, {where} has {free} left")
    # The name goes at once, the file when the last mapping does: a killed run leaves nothing behind.
    with tempfile.NamedTemporaryFile(dir=where, prefix="memory-", suffix=".part") as file:
        file.truncate(size * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
