"""The parameters of a shared forward pass, and the table that receives each client's gradients.

All clients share x, so a layer runs once on the records of all of them, and its backward pass computes one weight
gradient per client. A `GradientSink` holds the block's matrix ``[c, d]`` while it is filled. A `ParameterSlot` is the
part of it that belongs to one parameter: rules read `ParameterSlot.value` and write directly into `ParameterSlot.rows`.
If every record's gradient is clipped, nothing is written during the backward pass: the sink keeps what each rule needs
to write its gradient (`record_sums.Use`) until the norms of all records are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...kernels.tiles import Tiles
from ...problems.objective import Buffers

if TYPE_CHECKING:
    from ...kernels.convolution import Moments
    from .lazy_norms import LazyNorms
    from .record_sums import Products, Squares, Use, Write

Maybe = Tensor | None


class NoRule(Exception):  # noqa: N818  # not an error: another engine is used
    """The shared pass has no rule for a part of the model; the message names it."""


class PackedWeights:
    """The weights of a model's small convolutions in the order in which `kernels.convolution` reads them.

    The weights to pack are known when a model is converted; one kernel launch per pass packs their values.
    """

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, Tiles], tuple[int, int]] = {}  # by the parameter's start in x and its layout
        self._size = 0
        self._table = torch.empty(0, dtype=torch.int32)
        self._packed: Tensor | None = None

    def add(self, start: int, tiles: Tiles) -> None:
        """Register that the parameter at `start` is needed in this layout."""
        if (start, tiles) not in self._wanted:
            size = tiles.depth * tiles.breadth
            self._wanted[start, tiles] = (self._size, size)
            self._size += size

    def forget(self) -> None:
        """Discard the packed values, because x may change."""
        self._packed = None

    def weights(self, x: Tensor, dtype: torch.dtype, start: int, tiles: Tiles) -> Tensor:
        """Return the weights packed from the flat `x`; the first request in a pass packs all of them."""
        if self._packed is None or self._packed.dtype != dtype:
            from ...kernels.convolution import pack

            if len(self._table) != self._size or self._table.device != x.device:
                tables = [wanted.table(start).flatten() for start, wanted in self._wanted]
                self._table = torch.cat(tables).to(x.device)
            self._packed = pack(x, self._table, dtype)
        begin, size = self._wanted[start, tiles]
        return self._packed[begin : begin + size]


@dataclass
class GradientSink:
    """The state of one block of clients while it passes through the model."""

    clients: int = 0
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    buffers: Buffers = field(default_factory=dict)  # the block's rows
    slots: list[ParameterSlot] = field(default_factory=list)
    tables: Sequence[Tensor] = ()  # the gradients of each slot, if they have memory of their own and not in `grads`
    packing: PackedWeights = field(default_factory=PackedWeights)
    normed: bool = False  # whether a BatchNorm may use the moments of a convolution's output
    waits: bool = False  # whether there are norms that may wait for what follows them
    moments: dict[int, tuple[Tensor, int, Moments]] = field(default_factory=dict)  # by the id of the images
    lazy: LazyNorms | None = None  # while the model runs and its norms wait
    counts: Counter[str] = field(default_factory=Counter)  # increments of buffers that count batches
    by_record: bool = False  # whether the gradients of single records are clipped
    uses: dict[ParameterSlot, list[Use]] = field(default_factory=dict)  # with `by_record`, each use of each parameter

    def fill(self, x: Tensor, grads: Tensor, buffers: Buffers, tables: Sequence[Tensor] = ()) -> None:
        """Prepare a forward pass at `x` whose backward pass fills `grads`, or `tables`, one for each slot."""
        self.x, self.grads, self.buffers, self.clients = x.detach(), grads, buffers, len(grads)
        self.tables = tables
        self.counts.clear()
        self.moments.clear()
        self.uses.clear()
        self.packing.forget()
        for slot in self.slots:
            slot.written = False

    def packed(self, dtype: torch.dtype, slot: ParameterSlot, tiles: Tiles) -> Tensor:
        """Return a convolution's weights in the layout of its kernel."""
        return self.packing.weights(self.x, dtype, slot.start, tiles)

    def record_moments(self, images: Tensor, moments: Moments | None) -> None:
        """Store the moments of a convolution's output; the images are kept, so that no other images get their id."""
        if moments is not None:
            self.moments[id(images)] = images, images._version, moments

    def moments_of(self, images: Tensor) -> Moments | None:
        """Return the moments of the images if they are the unchanged output of a convolution, else None."""
        held, version, moments = self.moments.pop(id(images), (None, 0, None))
        return moments if held is images and images._version == version else None

    def used(self, x: Tensor) -> Tensor:
        """Return the input of a layer; if a norm waits to know how it is used, this is its output."""
        return x if self.lazy is None else self.lazy.use(x)

    def count_batch(self, counter: str) -> None:
        """Count a batch; all counting buffers are updated together at the end of the pass."""
        self.counts[counter] += 1

    def finish(self) -> None:
        """End the pass: unused parameters get gradient zero, and references to the block are dropped."""
        for times in set(self.counts.values()):
            torch._foreach_add_([self.buffers[name] for name, count in self.counts.items() if count == times], times)
        for slot in self.slots:
            if not slot.written:
                slot.rows.zero_()
        self.clear()

    def clear(self) -> None:
        self.x, self.grads, self.buffers, self.tables = torch.empty(0), torch.empty(0, 0), {}, ()
        self.uses.clear()
        self.counts.clear()
        self.moments.clear()
        self.packing.forget()


class ParameterSlot:
    """One parameter: a view of x for the forward pass, and rows of the gradient matrix for the backward pass."""

    def __init__(self, sink: GradientSink, number: int, start: int, shape: torch.Size) -> None:
        """`number` counts the slots; `start` is the parameter's first position in x."""
        self.sink, self.number, self.start, self.shape, self.written = sink, number, start, shape, False

    @property
    def value(self) -> Tensor:
        """A leaf that requires a gradient, so that autograd records the layer even if its input requires none."""
        return self.sink.x[self.start : self.start + self.shape.numel()].view(self.shape).detach().requires_grad_()

    @property
    def rows(self) -> Tensor:
        """A view ``[c, *shape]`` of the block's gradients, or the slot's own table."""
        if self.sink.tables:
            return self.sink.tables[self.number]
        part = self.sink.grads[:, self.start : self.start + self.shape.numel()]
        return part.view(self.sink.clients, *self.shape)

    def put(
        self,
        write: Write,
        *tensors: Tensor,
        products: Products | None = None,
        squares: Squares | None = None,
        direct: bool = False,
    ) -> None:
        """Fill the gradient with `write(rows, *tensors)`; a parameter that is used twice gets the sum.

        The first of `tensors` is the gradient of the layer's output, and `write` is linear in it. All of them hold the
        records of the block in order, so that any part of them is the input of the same records' gradient. `products`
        and `squares` are faster ways to the gradients or norms of single records, unless `write` is fastest, which
        `direct` says (`record_sums.Use`).
        """
        if self.sink.by_record:
            from .record_sums import Use

            held = tuple(tensor.detach() for tensor in tensors)
            self.sink.uses.setdefault(self, []).append(Use(self.shape, write, held, products, squares, direct))
        elif self.written:
            more = torch.empty_like(self.rows, memory_format=torch.contiguous_format)
            write(more, *tensors)
            self.rows.add_(more)
        else:
            write(self.rows, *tensors)
            self.written = True


SlotPair = tuple[ParameterSlot | None, ParameterSlot | None]  # of weight and bias; None if there is no gradient


def values_of(slots: Sequence[ParameterSlot | None]) -> list[Maybe]:
    """Return the values of parameters for the forward pass."""
    return [slot.value if slot is not None else None for slot in slots]


@contextmanager
def filled(slots: Sequence[ParameterSlot | None], spare: Tensor) -> Iterator[list[Tensor]]:
    """Yield rows of several parameters to be overwritten together; a parameter that is used twice gets the sum.

    `spare`, of the rows' shape, replaces the rows of a parameter that needs no gradient.
    """
    before = [slot.rows.clone() if slot is not None and slot.written else None for slot in slots]
    yield [slot.rows if slot is not None else spare for slot in slots]
    for slot, earlier in zip(slots, before, strict=True):
        if slot is not None:
            slot.written = True
            if earlier is not None:
                slot.rows.add_(earlier)


def parameter_slots(model: nn.Module, sink: GradientSink) -> dict[nn.Parameter, ParameterSlot]:
    """Give the sink a slot for each trainable parameter, in the order of the flat vector, and return them."""
    slots: dict[nn.Parameter, ParameterSlot] = {}
    position = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            slots[parameter] = ParameterSlot(sink, len(slots), position, parameter.shape)
            position += parameter.numel()
    sink.slots = list(slots.values())
    return slots


def sum_positions(rows: Tensor, values: Tensor) -> None:
    """rows[i] = the sum of part i of the values over all dimensions but the last ones, which are those of a row."""
    rows.copy_(values.reshape(len(rows), -1, *rows.shape[1:]).sum(1, dtype=rows.dtype))


def sum_channels(rows: Tensor, values: Tensor) -> None:
    """rows[i] = the sum of part i of the values ``[records, channels, ...]`` for each channel."""
    per_part = values.reshape(len(rows), -1, values.shape[1], values[0, 0].numel())
    rows.copy_(per_part.sum((1, 3), dtype=rows.dtype))


def _product(left: Tensor, right: Tensor, rows: Tensor) -> None:
    """rows[i] = left[i]ᵀ right[i], written in place if the precisions agree."""
    if left.dtype == rows.dtype:
        torch.bmm(left.mT, right, out=rows)
    else:
        rows.copy_(torch.bmm(left.mT, right))


def write_products(flipped: bool, rows: Tensor, g: Tensor, x: Tensor) -> None:
    """rows[i] = the weight gradient of a linear layer, from part i of its output's gradient and of its input."""
    left, right = (part.reshape(len(rows), -1, part.shape[-1]) for part in (g, x))
    _product(right, left, rows) if flipped else _product(left, right, rows)


def factors(flipped: bool, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a record's weight gradient, ``[records, 1, positions, ·]``."""
    left, right = (part.reshape(len(part), 1, -1, part.shape[-1]) for part in (g, x))
    return (right, left) if flipped else (left, right)
