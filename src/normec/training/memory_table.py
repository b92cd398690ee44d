"""The tables ``[n, …]`` of the clients' states, on the device, in host memory, or in a file."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError
from ..gradients.engine import Block

Home = Literal["device", "host", "disk"]
HOMES: tuple[str, ...] = get_args(Home)


@dataclass(frozen=True)
class MemoryTable:
    """Where a table is kept and in which precision. A round accesses the rows of the clients that take part.

    "host" and "disk" are for tables that do not fit on the device; rows are copied to the device and back. "disk" is a
    file that is mapped into memory, so rows that are not accessed need no RAM. "bfloat16" halves the table; see
    `rounded`.
    """

    dtype: torch.dtype | None = None  # None: the dtype of x
    home: Home = "device"

    def of(self, start: Tensor, clients: int, like: Tensor, folder: Path | None) -> Tensor:
        """Return a table of one state for n clients, in which every row is `start`.

        States of the size of x are kept at `home`; smaller ones and integers stay on the device.
        """
        if start.shape != like.shape or not start.is_floating_point():
            return start.to(like.device).repeat(clients, *[1] * start.ndim)
        dtype = self.dtype or start.dtype
        shape = (clients, len(like))
        if self.home == "device":
            table = like.new_zeros(shape, dtype=dtype)
        elif self.home == "host":
            table = torch.zeros(shape, dtype=dtype)
        else:
            table = _mapped(shape, dtype, folder)
        if bool(start.any()):
            table += start.to(table)
        return table


def read_rows(table: Tensor, block: Block, like: Tensor) -> Tensor:
    """Return a copy of the block's rows on the device of `like`; floating-point rows get its precision."""
    where = block.rows if isinstance(block.rows, slice) or table.device == block.grads.device else block.row_numbers
    dtype = like.dtype if table.is_floating_point() else table.dtype
    rows = table[where]
    return rows.to(like.device, dtype, copy=isinstance(where, slice))


def write_rows(table: Tensor, block: Block, new: Tensor, seed: int) -> Tensor:
    """Write the block's rows and return them as the table stores them."""
    kept = rounded(new, table.dtype, seed)
    table[block.row_numbers.to(table.device)] = kept.to(table.device)
    return kept


def _mapped(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    size = shape[0] * shape[1]
    where = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
    while not where.is_dir():  # a run's folder is created only after its first gradients were found finite
        where = where.parent
    if (free := shutil.disk_usage(where).free) < size * dtype.itemsize:
        raise UsageError(
            f"memory_home 'disk' needs {size * dtype.itemsize} bytes, {where} has {free} left; "
            "free some space or choose another memory_home"
        )
    # The file is unlinked at once and disappears with its last mapping, so a killed run leaves nothing behind.
    with tempfile.NamedTemporaryFile(dir=where, prefix="memory-", suffix=".part") as file:
        file.truncate(size * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)


def rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round float32 to bfloat16 stochastically, up or down with the probabilities that keep the mean.

    Rounding to nearest would lose every step below 1/512 of a memory, and the memory would not move. Values that are
    not finite stay so.
    """
    if dtype != torch.bfloat16:
        return values.to(dtype)
    draw = torch.Generator(values.device).manual_seed(seed)
    bits = values.float().view(torch.int32)
    low = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=values.device, generator=draw)
    return torch.where(values.isfinite(), ((bits + low) & -65536).view(torch.float32), values).to(dtype)
