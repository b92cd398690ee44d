"""Sums of clipped gradients of single records, without the gradient of every record where that is possible.

The gradient of a weight for one record is a product ΣₜL_tᵀR_t of what the backward pass has at hand: the gradients L of
a layer's output and its inputs R, over the T positions of the record. Its norm follows from the two factors,

    ‖Σₜ L_tᵀR_t‖² = Σₜₛ ⟨L_t, L_s⟩ ⟨R_t, R_s⟩,

and the sum over a client's records of the gradients times their clip factors is one product, of L scaled by the factors
with R. So one backward pass is enough ("book-keeping", Bu et al., arXiv 2210.00038), and the table of all records'
gradients exists only where it is small, or a parameter is used more than once.

**The norm is never too small.** The double sum cancels, and the error of computing it in floating point is relative to
K = (Σₜ ‖L_t‖ ‖R_t‖)², not to the sum. `_SLACK` · u · K is added to it, u the unit roundoff, which exceeds that error
for inner products in blocks. Where T = 1 nothing cancels and nothing is added. A clipped gradient is therefore never
longer than the clip, up to the rounding of the product with which it is added to the sum. All of this is computed in
the precision of x, without TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...algorithms.operators import norms, smallest_reliable_norm
from ..precision import products as products_in

if TYPE_CHECKING:
    from ..record_clip import RecordClip

Write = Callable[..., object]  # (rows [k, *shape], *tensors): the gradients of k equal parts of the records
Products = Callable[..., tuple[Tensor, Tensor]]  # tensors → L and R, [records, groups, T, ·]
Squares = Callable[..., Tensor]  # tensors → the squared norm of each record's gradient

_HELD = {"cpu": 2**24, "cuda": 2**28}  # numbers in the gradients of single records that are held at once
_SLACK = 64.0
Key = TypeVar("Key")


@dataclass(frozen=True)
class Use:
    """One use of a parameter in the model: how the gradient of some records is computed from the use's tensors."""

    shape: torch.Size
    write: Write
    tensors: tuple[Tensor, ...]
    products: Products | None = None
    squares: Squares | None = None

    def part(self, start: int, stop: int, records: int) -> Use:
        """Return the same use of the records from `start` to `stop`."""
        sizes = [len(tensor) // records for tensor in self.tensors]
        tensors = tuple(t[start * size : stop * size] for t, size in zip(self.tensors, sizes, strict=True))
        return Use(self.shape, self.write, tensors, self.products, self.squares)

    def exact(self, dtype: torch.dtype) -> Use:
        """Return the same use with floating-point tensors in the precision of x."""
        tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in self.tensors)
        return Use(self.shape, self.write, tensors, self.products, self.squares)

    def scaled(self, factors: Tensor, absent: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors with the gradients of the output times a factor for each record.

        Records that are `absent` are zero in all tensors, whatever the model made of them.
        """
        shape = (len(factors), -1)
        first, *others = self.tensors
        scaled = (first.reshape(shape) * factors[:, None]).view(first.shape)
        hidden = absent[:, None]
        return tuple(
            t.reshape(shape).masked_fill(hidden, 0).view(t.shape) if t.is_floating_point() else t
            for t in (scaled, *others)
        )

    def each(self, records: int) -> Tensor:
        """Return the gradient of each record, ``[records, numbers]``."""
        if self.products is not None:
            left, right = self.products(*self.tensors)
            return (left.mT @ right).reshape(records, -1)
        rows = self.tensors[0].new_empty(records, *self.shape)
        self.write(rows, *self.tensors)
        return rows.view(records, -1)

    @property
    def one_position(self) -> bool:
        """Whether a record has one position in a linear layer, so that its gradient is a product of two vectors."""
        return self.tensors[0].shape[1:-1].numel() == 1

    def fast_squares(self) -> Tensor | None:
        """Return the squared norm of each record's gradient if it is cheaper than the gradients, else None."""
        if self.squares is not None:
            return self.squares(*self.tensors)
        if self.products is None:
            return None
        left, right = self.products(*self.tensors)
        positions, size = left.shape[2], left.shape[3] * right.shape[3]
        return product_squares(left, right) if positions == 1 or positions**2 <= size else None


def product_squares(left: Tensor, right: Tensor, same: Tensor | None = None) -> Tensor:
    """Return upper bounds of ‖Σₜ L_tᵀR_t‖² for [records, groups, T, ·], which are nearly equal to it.

    `same`, of shape [records, groups, T, T], replaces the inner products of R.
    """
    inner, outer = left.square().sum(-1), right.square().sum(-1)
    # Squares below the normal numbers count as the smallest reliable one, so the norm is never too small.
    inner, outer = (part.clamp_min(smallest_reliable_norm(left.dtype) ** 2) for part in (inner, outer))
    if left.shape[2] == 1:
        return (inner * outer).sum((1, 2))
    most = (inner * outer).sqrt().sum(2).square()
    found = ((left @ left.mT) * (right @ right.mT if same is None else same)).sum((2, 3))
    return (found.clamp_min(0) + _SLACK * torch.finfo(left.dtype).eps / 2 * most).sum(1)


@torch.no_grad()
@products_in("float32")
def add_up(
    uses: Mapping[Key, Sequence[Use]],
    rows: Callable[[Key], Tensor],
    clip: RecordClip,
    weights: Tensor,
    layers: int,
) -> None:
    """Write Σ_r w_r · clip(g_r) over the records of each client into `rows(key)`, ``[clients, *shape]``.

    Args:
        uses: The uses of each parameter, in the precision of x.
        rows: The gradients of a parameter, which are overwritten.
        clip: The clip of a record's gradient.
        weights: The weight of each record, ``[clients, B]``; zero for records that only fill up a batch.
        layers: The number of trainable tensors, for a clip by layer.
    """
    records = weights.numel()
    squares: dict[Key, Tensor] = {}
    held: dict[Key, Tensor] = {}
    left = _HELD.get(weights.device.type, _HELD["cpu"])
    for key, several in uses.items():
        found, size = [], several[0].shape.numel()
        # One product for each record is less work than two for its norm and one for the sum, where memory is left.
        fast = None
        if len(several) == 1 and (several[0].one_position or records * size > left):
            fast = several[0].fast_squares()
        if fast is not None:
            squares[key] = fast
            continue
        for start, stop in _parts(records, left // max(1, size)):
            grads = sum_of([use.part(start, stop, records).each(stop - start) for use in several])
            found.append(_square_norms(grads))
            if stop - start == records:  # they fit, and need not be computed again
                held[key], left = grads, left - grads.numel()
        squares[key] = torch.cat(found)
    if clip.by_layer:
        factors = {key: clip.factors(square.sqrt(), layers) for key, square in squares.items()}
    else:
        whole = clip.factors(sum_of(list(squares.values())).sqrt()) if squares else weights.flatten()
        factors = dict.fromkeys(squares, whole)
    flat = weights.flatten()
    absent = flat == 0
    for key, several in uses.items():
        shares = (factors[key] * flat).masked_fill(absent, 0)
        target = rows(key)
        if key in held:
            grads = held.pop(key).masked_fill_(absent[:, None], 0).view(len(weights), -1, target[0].numel())
            target.copy_(torch.bmm(shares.view(len(weights), 1, -1), grads).view_as(target))
            continue
        first, *others = several
        first.write(target, *first.scaled(shares, absent))
        for use in others:
            more = torch.empty_like(target, memory_format=torch.contiguous_format)
            use.write(more, *use.scaled(shares, absent))
            target.add_(more)


def _square_norms(grads: Tensor) -> Tensor:
    """Return squared norms of rows; those below the normal numbers count as the smallest reliable one."""
    squares = norms(grads)[:, 0].square()
    return torch.where(grads.any(1), squares.clamp_min(smallest_reliable_norm(grads.dtype) ** 2), squares)


def _parts(records: int, most: int) -> Iterator[tuple[int, int]]:
    size = max(1, most)
    for start in range(0, records, size):
        yield start, min(records, start + size)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of some tensors of one shape."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
