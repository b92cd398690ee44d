"""Sums of clipped gradients of single records, without the gradient of every record where that is possible.

The gradient of a weight for one record is a product ΣₜL_tᵀR_t of what the backward pass has at hand: the gradients L of
a layer's output and its inputs R, over the T positions of the record. Its norm follows from the two factors,

    ‖Σₜ L_tᵀR_t‖² = Σₜₛ ⟨L_t, L_s⟩ ⟨R_t, R_s⟩,

and the sum over a client's records of the gradients times their clip factors is one product, of L scaled by the factors
with R. So one backward pass is enough ("book-keeping", Bu et al., arXiv 2210.00038). Where memory allows it, a table of
all records' gradients (`tables`) is less work: one product for each record, of which the norm and the sum are taken.

**The norm is never too small.** A table is computed in the precision of the backward pass, because the norm is that of
the numbers in it, however they were rounded. Without a table, the norm and the sum come from different products, which
round differently what cancels: the error of both is relative to K = (Σₜ ‖L_t‖ ‖R_t‖)², not to the sum. So a term
`_SLACK` · u · K, u the unit roundoff, is added to the squared norm, whether it comes from the double sum or from the
gradients of some records at a time. This exceeds the error of the double sum for inner products in blocks, and
positions that cancel get a factor of at most C/√(`_SLACK` · u · K), with which the rounding error of the sum is a small
part of the clip C. Where T = 1 nothing cancels and nothing is added. A clipped gradient is therefore never longer than
the clip, up to the rounding of the product with which it is added to the sum. All but the tables is computed in the
precision of x, without TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

_HELD = {"cpu": 2**25, "cuda": 2**28}  # numbers in the gradients of single records that are held at once
_SLACK = 64.0
Key = TypeVar("Key")


@dataclass(frozen=True)
class Use:
    """One use of a parameter in the model: how the gradient of some records is computed from the use's tensors.

    `direct`: for single records, `write` is faster than the product of the factors.
    """

    shape: torch.Size
    write: Write
    tensors: tuple[Tensor, ...]
    products: Products | None = None
    squares: Squares | None = None
    direct: bool = False

    def part(self, start: int, stop: int, records: int) -> Use:
        """Return the same use of the records from `start` to `stop`."""
        sizes = [len(tensor) // records for tensor in self.tensors]
        tensors = tuple(t[start * size : stop * size] for t, size in zip(self.tensors, sizes, strict=True))
        return replace(self, tensors=tensors)

    def exact(self, dtype: torch.dtype) -> Use:
        """Return the same use with floating-point tensors in the precision of x."""
        tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in self.tensors)
        return replace(self, tensors=tensors)

    def scaled(self, factors: Tensor, absent: Tensor | None) -> tuple[Tensor, ...]:
        """Return the tensors with the gradients of the output times a factor for each record.

        Records that are `absent` are zero in all tensors, whatever the model made of them.
        """
        shape = (len(factors), -1)
        first, *others = self.tensors
        scaled = (first.reshape(shape) * factors[:, None]).view(first.shape)
        if absent is None:
            return scaled, *others
        hidden = absent[:, None]
        return tuple(
            t.reshape(shape).masked_fill(hidden, 0).view(t.shape) if t.is_floating_point() else t
            for t in (scaled, *others)
        )

    def each(self, records: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient of each record, ``[records, numbers]`` of this dtype."""
        if self.products is not None and not self.direct:
            return _wide_products(*self.products(*self.tensors), dtype).reshape(records, -1)
        rows = self.tensors[0].new_empty(records, *self.shape, dtype=dtype)
        self.write(rows, *self.tensors)
        return rows.view(records, -1)

    def adds_up(self, records: int) -> bool:
        """Whether the gradient of a record is a sum of terms, which may cancel."""
        return self.products is not None or self.tensors[0].numel() != records * self.shape.numel()

    def lengths_of_terms(self, records: int, dtype: torch.dtype) -> Tensor:
        """Return √K of each record: how long its gradient can be at most if no term cancels another."""
        if self.products is not None and not self.direct:
            left, right = self.products(*self.tensors)
            return _terms(*_square_lengths(left, right)).sum(1).sqrt()
        # A gradient is a sum of products of numbers in the tensors.
        positive = tuple(tensor.abs() if tensor.is_floating_point() else tensor for tensor in self.tensors)
        return norms(replace(self, tensors=positive).each(records, dtype))[:, 0]

    @property
    def one_position(self) -> bool:
        """Whether a record has one position, so that its gradient is a product of two vectors, as its norm is."""
        known = self.products is not None or self.squares is not None
        return known and self.tensors[0].shape[1:-1].numel() == 1

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
    inner, outer = _square_lengths(left, right)
    if left.shape[2] == 1:
        return (inner * outer).sum((1, 2))
    found = ((left @ left.mT) * (right @ right.mT if same is None else same)).sum((2, 3))
    return (found.clamp_min(0) + _slack(left.dtype) * _terms(inner, outer)).sum(1)


def _square_lengths(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖L_t‖² and ‖R_t‖², [records, groups, T].

    Squares below the normal numbers count as the smallest reliable one, so no norm is too small.
    """
    least = smallest_reliable_norm(left.dtype) ** 2
    return left.square().sum(-1).clamp_min(least), right.square().sum(-1).clamp_min(least)


def _terms(inner: Tensor, outer: Tensor) -> Tensor:
    """Return K of each group, [records, groups], from squared lengths."""
    return (inner * outer).sqrt().sum(2).square()


def _slack(dtype: torch.dtype) -> float:
    return _SLACK * torch.finfo(dtype).eps / 2


def _wide_products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return LᵀR of each record in this dtype; a GPU writes products of half precision in it, without rounding them."""
    if left.dtype == dtype or not left.is_cuda or not hasattr(torch.ops.aten.bmm, "dtype"):
        return (left.mT @ right).to(dtype)
    found: Tensor = torch.bmm(left.flatten(0, 1).mT, right.flatten(0, 1), out_dtype=dtype)
    return found


@torch.no_grad()
def tables(uses: Mapping[Key, Sequence[Use]], weights: Tensor) -> dict[Key, Tensor]:
    """Return the gradients of single records, ``[records, numbers]``, of the parameters where they are the least work.

    One product for each record is less work than two for its norm and one for the sum, where memory is left.
    `weights` are those of `add_up`.
    """
    records, left = weights.numel(), most_held(weights.device)
    found: dict[Key, Tensor] = {}
    # Small parameters come first: they are used at many positions, where norms without a table take long.
    for key, several in sorted(uses.items(), key=lambda item: item[1][0].shape.numel()):
        size = records * several[0].shape.numel()
        if size <= left and (len(several) > 1 or not several[0].one_position):
            found[key] = sum_of([use.each(records, weights.dtype) for use in several])
            left -= size
    return found


def most_held(device: torch.device) -> int:
    """Return how many numbers in the gradients of single records are held at once."""
    return _HELD.get(device.type, _HELD["cpu"])


@torch.no_grad()
@products_in("float32")
def add_up(
    uses: Mapping[Key, Sequence[Use]],
    held: Mapping[Key, Tensor],
    rows: Callable[[Key], Tensor],
    clip: RecordClip,
    weights: Tensor,
    layers: int,
    *,
    whole: bool = False,
) -> None:
    """Write Σ_r w_r · clip(g_r) over the records of each client into `rows(key)`, ``[clients, *shape]``.

    Args:
        uses: The uses of each parameter without a table, in the precision of x.
        held: The tables of the others.
        rows: The gradients of a parameter, which are overwritten.
        clip: The clip of a record's gradient.
        weights: The weight of each record, ``[clients, B]``; zero for records that only fill up a batch.
        layers: The number of trainable tensors, for a clip by layer.
        whole: Whether no record only fills up a batch.
    """
    records, flat = weights.numel(), weights.flatten()
    squares = dict(zip(held, _square_norms(list(held.values())), strict=True))
    left = most_held(weights.device) - sum(grads.numel() for grads in held.values())
    for key, several in uses.items():
        fast = several[0].fast_squares() if len(several) == 1 else None
        if fast is None:
            size = several[0].shape.numel()
            parts = [
                _squares_of([use.part(start, stop, records) for use in several], stop - start, weights.dtype)
                for start, stop in _parts(records, left // max(1, size))
            ]
            fast = torch.cat(parts)
        squares[key] = fast
    absent = None if whole else flat == 0

    def shares_of(lengths: Tensor, parts: int = 1) -> Tensor:
        shares = clip.factors(lengths, parts) * flat
        return shares if absent is None else shares.masked_fill(absent, 0)

    if clip.by_layer:
        shares = {key: shares_of(square.sqrt(), layers) for key, square in squares.items()}
    elif squares:
        shares = dict.fromkeys(squares, shares_of(torch.stack(list(squares.values())).sum(0).sqrt()))
    for key, grads in held.items():
        target, shown = rows(key), grads if absent is None else grads.masked_fill(absent[:, None], 0)
        product = torch.bmm(shares[key].view(len(weights), 1, -1), shown.view(len(weights), -1, grads.shape[1]))
        target.copy_(product.view_as(target))
    for key, several in uses.items():
        target, (first, *others) = rows(key), several
        first.write(target, *first.scaled(shares[key], absent))
        for use in others:
            more = torch.empty_like(target, memory_format=torch.contiguous_format)
            use.write(more, *use.scaled(shares[key], absent))
            target.add_(more)


def _squares_of(uses: Sequence[Use], records: int, dtype: torch.dtype) -> Tensor:
    """Return upper bounds of the squared norms of some records' gradients, which are not kept."""
    squares = _square_norms([sum_of([use.each(records, dtype) for use in uses])])[0]
    if len(uses) == 1 and not uses[0].adds_up(records):
        return squares
    lengths = sum_of([use.lengths_of_terms(records, dtype) for use in uses])
    return squares + _slack(dtype) * lengths.square()


def _square_norms(tables: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return squared norms of rows; those below the normal numbers count as the smallest reliable one."""
    if not tables:
        return ()
    lengths = torch.stack([norms(grads)[:, 0] for grads in tables])
    return lengths.square().clamp_min(smallest_reliable_norm(lengths.dtype) ** 2).unbind()


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
