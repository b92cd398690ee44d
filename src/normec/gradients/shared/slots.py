"""Where the parameters of a shared forward pass come from, and where each client's gradients go.

All clients share x, so a layer runs once on the records of all of them, and its backward pass computes one weight
gradient per client. A `GradientSink` holds the block's matrix ``[c, d]`` while it is filled. A `ParameterSlot` is the
part of it that belongs to one parameter: rules read `ParameterSlot.value` and write directly into `ParameterSlot.rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.tiles import Tiles
from ...problems.objective import Buffers

if TYPE_CHECKING:
    from ...kernels.convolution import Moments


class PackedWeights:
    """The weights of a model's small convolutions in the order in which `kernels.convolution` reads them.

    Which weights are packed is known when a model is converted; one launch a pass packs their values.
    """

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, Tiles], tuple[int, int]] = {}  # by the parameter's start in x and its use
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


@dataclass
class GradientSink:
    """One block of clients on its way through the model."""

    clients: int = 0
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    buffers: Buffers = field(default_factory=dict)  # the block's rows
    slots: list[ParameterSlot] = field(default_factory=list)
    packing: PackedWeights = field(default_factory=PackedWeights)
    normed: bool = False  # whether a BatchNorm may ask for the moments of what a convolution made
    moments: dict[int, tuple[Tensor, int, Moments]] = field(default_factory=dict)  # by the images' identity
    counts: Counter[str] = field(default_factory=Counter)  # what is to be added to buffers that count passes

    def fill(self, x: Tensor, grads: Tensor, buffers: Buffers) -> None:
        """Make ready for a forward pass at `x` whose backward pass fills `grads`."""
        self.x, self.grads, self.buffers, self.clients = x.detach(), grads, buffers, len(grads)
        self.counts.clear()
        self.moments.clear()
        self.packing.forget()
        for slot in self.slots:
            slot.written = False

    def packed(self, dtype: torch.dtype, slot: ParameterSlot, tiles: Tiles) -> Tensor:
        """A convolution's weights as its kernel wants them."""
        return self.packing.weights(self.x, dtype, slot.start, tiles)

    def record_moments(self, images: Tensor, moments: Moments | None) -> None:
        """What a convolution knows of the images it made; they are kept, so that no others can pass for them."""
        if moments is not None:
            self.moments[id(images)] = images, images._version, moments

    def moments_of(self, images: Tensor) -> Moments | None:
        """Their moments, where they are a convolution's just as it left them."""
        held, version, moments = self.moments.pop(id(images), (None, 0, None))
        return moments if held is images and images._version == version else None

    def count_batch(self, counter: str) -> None:
        """One more batch for a buffer that counts them; all are told at once, when the pass is over."""
        self.counts[counter] += 1

    def finish(self) -> None:
        """A parameter that took no part has gradient zero; nothing of the block is kept alive."""
        for times in set(self.counts.values()):
            torch._foreach_add_([self.buffers[name] for name, count in self.counts.items() if count == times], times)
        for slot in self.slots:
            if not slot.written:
                slot.rows.zero_()
        self.clear()

    def clear(self) -> None:
        self.x, self.grads, self.buffers = torch.empty(0), torch.empty(0, 0), {}
        self.counts.clear()
        self.moments.clear()
        self.packing.forget()


class ParameterSlot:
    """One parameter: a view of x for the forward pass, rows of the gradient matrix for the backward pass."""

    def __init__(self, sink: GradientSink, start: int, shape: torch.Size) -> None:
        self.sink, self.start, self.shape, self.written = sink, start, shape, False

    @property
    def value(self) -> Tensor:
        """A leaf that asks for a gradient, so that the layer is recorded even where its input needs none."""
        return self.sink.x[self.start : self.start + self.shape.numel()].view(self.shape).detach().requires_grad_()

    @property
    def rows(self) -> Tensor:
        """[c, *shape], a view of the block's gradients."""
        part = self.sink.grads[:, self.start : self.start + self.shape.numel()]
        return part.view(self.sink.clients, *self.shape)

    def put(self, write: Callable[[Tensor], object]) -> None:
        """`write(rows)` fills the gradient; a parameter used twice gets the sum."""
        if self.written:
            more = torch.empty_like(self.rows, memory_format=torch.contiguous_format)
            write(more)
            self.rows.add_(more)
        else:
            write(self.rows)
            self.written = True


@contextmanager
def filled(slots: Sequence[ParameterSlot | None], spare: Tensor) -> Iterator[list[Tensor]]:
    """Rows of several parameters, to be overwritten at once; a parameter used twice gets the sum.

    `spare`, of the rows' shape, stands for one that asks for no gradient.
    """
    before = [slot.rows.clone() if slot is not None and slot.written else None for slot in slots]
    yield [slot.rows if slot is not None else spare for slot in slots]
    for slot, earlier in zip(slots, before, strict=True):
        if slot is not None:
            slot.written = True
            if earlier is not None:
                slot.rows.add_(earlier)
