"""The clients' side of a round on a block of gradients ``[c, d]``: the sum of messages, and the new memories.

Where Ψ only scales (normalising, clipping, nothing at all) no table of messages is needed: with v = ∇f_i − g_i,

    first pass    ‖v‖, and from it the factor s = Ψ's scale
    second pass   Σ s v, and g_i ← (1−λ) g_i + β s v in place

so the memory is read twice and written once, which is the least possible. `Method` stays the definition; this is
`client_step` with its sums taken in another order. A method or operator that defines these steps anew is never passed
here (`fits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from . import kernels
from .gradients import Block, upload
from .methods import CLIENT_STEPS, Method, by_rows, overridden
from .operators import defined_by_scale, norms

_TILE = 2**22  # numbers of a tile of rows: gradients and memory of a tile stay in the cache between the passes


@dataclass(frozen=True)
class Sent:
    """What a block sent: Σ m_i ``[d]``, and for each client ‖∇f_i − g_i‖ and ‖m_i‖ ``[c, 1]``."""

    total: Tensor
    distances: Tensor
    lengths: Tensor


def fits(method: Method) -> bool:
    """Whether `scaled` computes what the method defines: its client's steps are the scheme's, its operator scales."""
    return defined_by_scale(method.operator) and not overridden(method, *CLIENT_STEPS)


def scaled(method: Method, block: Block, memory: Tensor, seed: int) -> Sent:
    """For methods that fit. Uses up the block's gradients; changes the block's rows of `memory` in place.

    `seed` decides how a bfloat16 memory is rounded; pass another one for every block.
    """
    if not fits(method):
        raise TypeError(f"{method} does more than scale")
    if not method.feedback:
        return _update(method, block.grads, None, None, seed)
    if memory.device != block.grads.device:  # rows that live elsewhere come over, and go back
        where = block.rows if isinstance(block.rows, slice) else block.places
        held = memory[where].to(block.grads.device)
        sent = _update(method, block.grads, held, None, seed)
        memory[where] = held.to(memory.device)
        return sent
    if isinstance(block.rows, slice):
        return _update(method, block.grads, memory[block.rows], None, seed)
    return _update(method, block.grads, memory, block.rows, seed)


def _update(method: Method, grads: Tensor, memory: Tensor | None, index: Tensor | None, seed: int) -> Sent:
    keep = 1 - method.decay
    if kernels.usable(grads) and grads.dtype == torch.float32 and (memory is None or kernels.usable(memory)):
        from .kernels import update

        distances = update.distances(grads, memory, index)
        factor = scale(method, distances)
        total = update.move(grads, memory, index, factor, method.beta, keep, seed)
        return Sent(total, distances, factor * distances)
    held = memory[index] if memory is not None and index is not None else memory
    rows = max(1, _TILE // grads.shape[1]) if grads.device.type == "cpu" else len(grads)
    total, found = torch.zeros_like(grads[0]), []
    for start in range(0, len(grads), rows):
        tile = slice(start, start + rows)
        v = grads[tile]
        if held is not None:
            v -= held[tile]
        distances = norms(v)
        factor = scale(method, distances).to(v.dtype)
        if held is not None and held.dtype != v.dtype:
            kept = keep * held[tile].to(v.dtype)
            held[tile] = rounded(kept + method.beta * factor * v, held.dtype, seed + start)
            # What the memory took is what is sent, so that ĝ stays the memories' mean.
            total += (held[tile].to(v.dtype) - kept).sum(0) / method.beta
        else:
            total.addmv_(v.T, factor[:, 0])
            if held is not None:
                own = held[tile]
                (own.mul_(keep) if method.decay else own).addcmul_(v, method.beta * factor)
        found.append((distances, factor * distances))
    if memory is not None and index is not None and held is not None:
        memory[index] = held
    return Sent(total, torch.cat([a for a, _ in found]), torch.cat([b for _, b in found]))


def forget(method: Method, memory: Tensor, drawn: Tensor, seed: int, apart: bool = False) -> None:
    """What clients that were not drawn do, in place; `drawn` on the host. `apart`: each for itself."""
    if overridden(method, "idle_step"):
        away = torch.ones(len(memory), dtype=torch.bool)
        away[drawn] = False
        rows = away.nonzero()[:, 0].to(memory.device)
        wide = torch.float32 if memory.dtype == torch.bfloat16 else memory.dtype
        if len(rows):
            held = memory[rows].to(wide)
            kept = by_rows(method.idle_step, held) if apart else method.idle_step(held)
            memory[rows] = rounded(kept, memory.dtype, seed)
        return
    if not method.decay:
        return
    wide = torch.float32 if memory.dtype == torch.bfloat16 else memory.dtype
    factors = torch.full((len(memory), 1), 1 - method.decay, dtype=wide)
    factors[drawn] = 1.0
    factors = upload(factors, memory.device)
    if memory.dtype == wide:
        memory *= factors
    else:
        memory.copy_(rounded(memory * factors, memory.dtype, seed))


def scale(method: Method, distances: Tensor) -> Tensor:
    """The factors of messages, for methods that fit."""
    return cast(Tensor, method.operator.scale(distances))


def rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """float32 to bfloat16, up or down with the probability that keeps the mean: small steps are not lost.

    Rounding to the nearest would swallow every step below 1/256 of a memory, and the memory would stand still. What is
    not finite stays so.
    """
    if dtype != torch.bfloat16:
        return values.to(dtype)
    draw = torch.Generator(values.device).manual_seed(seed)
    bits = values.float().view(torch.int32)
    low = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=values.device, generator=draw)
    return torch.where(values.isfinite(), ((bits + low) & -65536).view(torch.float32), values).to(dtype)
