"""The fused client update of a block of gradients ``[c, d]``: the sum of the messages, and the new memories.

If Ψ only scales (normalisation, clipping, identity), no table of messages is needed: with v = ∇f_i − g_i,

    first pass    ‖v‖, and from it the factor s = Ψ's scale
    second pass   Σ s v, and g_i ← (1−λ) g_i + β s v in place

so the memory is read twice and written once, which is the minimum. The method's functions remain the definition; this
is `ScaledDifference` with its sums in another order (`algorithms.method.fused_form`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..algorithms.method import ScaledDifference
from ..algorithms.operators import norms
from ..gradients.engine import Block
from ..system.devices import upload
from .memory_table import rounded

_TILE = 2**22  # numbers per tile of rows, so that gradients and memory of a tile stay in the cache between the passes


@dataclass(frozen=True)
class Sent:
    """The messages of a block: their sum Σ m_i ``[d]``, and for each client ‖∇f_i − g_i‖ and ‖m_i‖ ``[c, 1]``.

    With weights the sum is Σ ω_i m_i.
    """

    total: Tensor
    distances: Tensor
    lengths: Tensor


def apply_fused(
    form: ScaledDifference, block: Block, memory: Tensor | None, seed: int, weights: Tensor | None = None
) -> Sent:
    """Compute the messages of a block and update its rows of `memory` in place; the gradients are overwritten.

    `seed` decides how a bfloat16 memory is rounded; pass a different one for every block. `weights`: the block's ω_i,
    ``[c]``, if they are not equal.
    """
    if not form.memory or memory is None:
        return _update(form, block.grads, None, None, seed, weights)
    if memory.device != block.grads.device:  # rows on another device are copied to the gradients' device and back
        where = block.rows if isinstance(block.rows, slice) else block.row_numbers
        held = memory[where].to(block.grads.device)
        sent = _update(form, block.grads, held, None, seed, weights)
        memory[where] = held.to(memory.device)
        return sent
    if isinstance(block.rows, slice):
        return _update(form, block.grads, memory[block.rows], None, seed, weights)
    return _update(form, block.grads, memory, block.rows, seed, weights)


def _update(
    form: ScaledDifference,
    grads: Tensor,
    memory: Tensor | None,
    index: Tensor | None,
    seed: int,
    weights: Tensor | None,
) -> Sent:
    if kernels.usable(grads) and grads.dtype == torch.float32 and (memory is None or kernels.usable(memory)):
        from ..kernels import update

        distances = update.distances(grads, memory, index)
        factor = form.scale(distances)
        total = update.move(grads, memory, index, factor, form.step, form.keep, seed, weights)
        return Sent(total, distances, factor * distances)
    held = memory.index_select(0, index) if memory is not None and index is not None else memory
    rows = max(1, _TILE // grads.shape[1]) if grads.device.type == "cpu" else len(grads)
    total, found = grads.new_zeros(grads.shape[1]), []
    for start in range(0, len(grads), rows):
        tile, whole = slice(start, start + rows), rows >= len(grads)
        v = grads if whole else grads[tile]
        own = held if whole or held is None else held[tile]
        if own is not None:
            v -= own
        distances = norms(v)
        factor = form.scale(distances).to(v.dtype)
        if own is not None and own.dtype != v.dtype:
            kept = form.keep * own.to(v.dtype)
            own.copy_(rounded(kept + form.step * factor * v, own.dtype, seed + start))
            # The message is what the rounded memory took, so that ĝ stays the mean of the memories.
            taken = own.to(v.dtype) - kept
            total += (taken if weights is None else taken * weights[tile, None]).sum(0) / form.step
        else:
            total.addmv_(v.T, factor[:, 0] if weights is None else factor[:, 0] * weights[tile])
            if own is not None:
                (own.mul_(form.keep) if form.keep != 1 else own).addcmul_(v, form.step * factor)
        found.append((distances, factor * distances))
    if memory is not None and index is not None and held is not None:
        memory.index_copy_(0, index, held)
    if len(found) == 1:
        return Sent(total, *found[0])
    return Sent(total, torch.cat([a for a, _ in found]), torch.cat([b for _, b in found]))


def forget(keep: float, memory: Tensor, drawn: Tensor, seed: int) -> None:
    """Multiply the memories of the clients that were not drawn by `keep`, in place; `drawn` is on the host."""
    wide = torch.float32 if memory.dtype == torch.bfloat16 else memory.dtype
    factors = torch.full((len(memory), 1), keep, dtype=wide)
    factors[drawn] = 1.0
    factors = upload(factors, memory.device)
    if memory.dtype == wide:
        memory *= factors
    else:
        memory.copy_(rounded(memory * factors, memory.dtype, seed))
