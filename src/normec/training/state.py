"""The state a run begins with: fresh, or as its checkpoint left it; and what a checkpoint takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.methods import Method
from ..errors import UsageError, one_of
from ..gradients import Block
from ..problems.objective import Objective
from .communicator import World
from .memory_table import MemoryTable, stateless
from .observer import whole
from .run import InitialMemory, State


def fresh(
    problem: Objective,
    method: Method,
    table: MemoryTable,
    start: InitialMemory,
    first: Iterator[Block],
    folder: Path | None,
    world: World,
) -> State:
    """Round 0. `first` are the gradients at x0 of all clients here, looked at only where memories start from them."""
    n, d = problem.clients, len(problem.x0)
    x, own = problem.x0.clone(), world.own(n)
    state = State(0, x, stateless(len(own), x), torch.zeros_like(x), problem.initial_buffers())
    if not method.feedback:
        if not isinstance(start, str) or start != "zero":
            raise UsageError(f"{method.name} has no memory; initial_memory must stay 'zero'")
        return state
    state.memory = table.zeros(len(own), x, folder)
    if isinstance(start, Tensor):
        if start.shape not in ((d,), (n, d)) or not bool(torch.isfinite(start).all()):
            raise UsageError(f"initial_memory must be finite, [{d}] or [{n}, {d}], got {list(start.shape)}")
        state.memory += (start if start.ndim == 1 else start[own.start : own.stop]).to(state.memory)
    else:
        one_of(("zero", "gradient"), initial_memory=start)
        if start == "gradient":
            for block in first:
                state.memory[block.places.to(state.memory.device)] = block.grads.to(state.memory)
    state.estimate = world.sum(state.memory.sum(0, dtype=x.dtype).to(x.device)) / n
    return state


def restored(
    problem: Objective,
    method: Method,
    table: MemoryTable,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    folder: Path | None,
    world: World,
) -> State:
    """The state in a checkpoint; rank 0 has read it (`tensors`), `facts` are known to all."""
    x, own = problem.x0, world.own(problem.clients)

    def told(name: str, like: Tensor) -> Tensor:
        known = tensors[name].to(like) if name in tensors else torch.zeros_like(like)
        return world.sum(known)

    memory = stateless(len(own), x)
    if method.feedback:
        memory = world.deal(tensors.get("memory"), table.zeros(len(own), x, folder))
    buffers = {name: told(f"buffer.{name}", rows) for name, rows in problem.initial_buffers().items()}
    return State(facts["round"], told("x", x), memory, told("estimate", x), buffers, facts["messages"])


def tensors_of(state: State, method: Method, clients: int, world: World) -> dict[str, Tensor]:
    """What a checkpoint holds, in the form of one process; only rank 0's counts.

    The same state gives the same file: a round that is saved twice must not overwrite what latest.json vouches for.
    """
    held = {"x": state.x, "estimate": state.estimate}
    if method.feedback:
        memory = world.collect(state.memory, clients)
        held |= {"memory": memory} if memory is not None else {}
    return held | {f"buffer.{name}": rows for name, rows in whole(state.buffers, world).items()}


def size_of(state: State, clients: int) -> int:
    """About how many bytes a checkpoint takes."""
    row = state.x.element_size() * len(state.x)
    return row * 2 + clients * len(state.x) * state.memory.element_size() * (state.memory.stride(0) > 0)
