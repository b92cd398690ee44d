"""The weights of a model's small convolutions in the order their kernel reads them, all by one launch a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.tiles import Tiles

Place = tuple[int, int]


class Packing:
    """Weights for `kernels.convolution`: which ones is known when a model is converted, their values pass by pass."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, Tiles], Place] = {}  # by the parameter's start in x and its use
        self._size = 0
        self._table = torch.empty(0, dtype=torch.int32)
        self._packed: Tensor | None = None

    def add(self, start: int, tiles: Tiles) -> None:
        """A parameter that begins at `start` will be wanted so."""
        if (start, tiles) not in self._wanted:
            size = tiles.depth * tiles.breadth
            self._wanted[start, tiles] = (self._size, size)
            self._size += size

    def forget(self) -> None:
        """x may change."""
        self._packed = None

    def weights(self, x: Tensor, dtype: torch.dtype, start: int, tiles: Tiles) -> Tensor:
        """Packed from the flat `x`; the first one asked for in a pass packs all."""
        if self._packed is None or self._packed.dtype != dtype:
            from ...kernels.convolution import pack

            if len(self._table) != self._size or self._table.device != x.device:
                tables = [wanted.table(place).flatten() for place, wanted in self._wanted]
                self._table = torch.cat(tables).to(x.device)
            self._packed = pack(x, self._table, dtype)
        begin, size = self._wanted[start, tiles]
        return self._packed[begin : begin + size]
