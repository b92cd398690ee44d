"""The state a run begins with: fresh, or as its checkpoint left it; and what a checkpoint takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError, one_of
from .gradients import Block
from .memories import MemoryTable, stateless
from .methods import Method
from .objective import Objective
from .run import InitialMemory, State


def fresh(
    problem: Objective,
    method: Method,
    table: MemoryTable,
    start: InitialMemory,
    first: Iterator[Block],
    folder: Path | None,
) -> State:
    """Round 0. `first` are all clients' gradients at x0, looked at only where the memories start from them."""
    n, d = problem.clients, len(problem.x0)
    x = problem.x0.clone()
    state = State(0, x, stateless(n, x), torch.zeros_like(x), problem.initial_buffers())
    if not method.feedback:
        if not isinstance(start, str) or start != "zero":
            raise UsageError(f"{method.name} has no memory; initial_memory must stay 'zero'")
        return state
    state.memory = table.zeros(n, x, folder)
    if isinstance(start, Tensor):
        if start.shape not in ((d,), (n, d)) or not bool(torch.isfinite(start).all()):
            raise UsageError(f"initial_memory must be finite, [{d}] or [{n}, {d}], got {list(start.shape)}")
        state.memory += start.to(state.memory)
    else:
        one_of(("zero", "gradient"), initial_memory=start)
        if start == "gradient":
            for block in first:
                state.memory[block.clients.to(state.memory.device)] = block.grads.to(state.memory)
    state.estimate = state.memory.mean(0, dtype=x.dtype).to(x.device)
    return state


def restored(
    problem: Objective, table: MemoryTable, tensors: dict[str, Tensor], facts: dict[str, Any], folder: Path | None
) -> State:
    """The state in a checkpoint."""
    device, n = problem.x0.device, problem.clients
    x = tensors["x"].to(device)
    memory = stateless(n, x)
    if "memory" in tensors:
        memory = table.zeros(n, x, folder)
        memory.copy_(tensors["memory"])
    buffers = {
        name.removeprefix("buffer."): rows.to(device) for name, rows in tensors.items() if name.startswith("buffer.")
    }
    return State(facts["round"], x, memory, tensors["estimate"].to(device), buffers, facts["messages"])


def tensors_of(state: State, feedback: bool) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    held = {"x": state.x, "estimate": state.estimate}
    if feedback:
        held["memory"] = state.memory
    return held | {f"buffer.{name}": rows for name, rows in state.buffers.items()}
