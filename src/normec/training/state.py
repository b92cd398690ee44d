"""The initial state of a run, its state from a checkpoint, and the tensors that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.method import ESTIMATE, Steps, Tables
from ..errors import UsageError, one_of
from ..gradients.engine import Block
from ..problems.objective import Objective
from .communicator import Communicator, gather_buffers
from .memory_table import MemoryTable
from .run import InitialMemory, State


def initial_state(
    problem: Objective,
    steps: Steps,
    table: MemoryTable,
    start: InitialMemory,
    first: Iterator[Block],
    folder: Path | None,
    communicator: Communicator,
    weights: Tensor | None = None,
) -> State:
    """Return the state before round 0.

    `first` are the gradients at x0 of this rank's clients; they are computed only if the memories start from them.
    `weights` are n·w_i of this rank's clients; None if all clients have equal weights.
    """
    n, d = problem.clients, len(problem.x0)
    x, own = problem.x0.clone(), communicator.local_clients(n)
    server = {name: value.clone() for name, value in steps.initial_server_state.items()}
    clients = {name: table.of(value, len(own), x, folder) for name, value in steps.initial_client_state.items()}
    state = State(0, x, clients, server, problem.initial_buffers())
    if isinstance(start, str) and start == "zero":
        return state
    if not steps.has_memory or ESTIMATE not in server:
        raise UsageError(f"{steps.method.name} has no memory; initial_memory must stay 'zero'")
    started = [clients[name] for name in steps.method.initial_memory_sets]
    if isinstance(start, Tensor):
        if start.shape not in ((d,), (n, d)):
            raise UsageError(f"initial_memory must have the shape [{d}] or [{n}, {d}], got {list(start.shape)}")
        if not bool(torch.isfinite(start).all()):
            raise UsageError("initial_memory must be finite, got NaN or inf in it; correct it or start from 'zero'")
        for held in started:
            held.copy_(start if start.ndim == 1 else start[own.start : own.stop])
    else:
        one_of(("zero", "gradient"), initial_memory=start)
        for block in first:
            for held in started:
                held[block.row_numbers.to(held.device)] = block.grads.to(held)
    memory = state.memory if weights is None else state.memory.to(x) * weights[:, None]
    server[ESTIMATE] = communicator.sum(memory.sum(0, dtype=x.dtype).to(x.device)) / n
    return state


def restored_state(
    problem: Objective,
    steps: Steps,
    table: MemoryTable,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    folder: Path | None,
    communicator: Communicator,
) -> State:
    """Return the state in a checkpoint. Only rank 0 has `tensors`; all ranks have `facts`."""
    x, own = problem.x0, communicator.local_clients(problem.clients)

    def shared(name: str, like: Tensor) -> Tensor:
        known = tensors[name].to(like) if name in tensors else torch.zeros_like(like)
        return communicator.sum(known)

    clients = {
        name: communicator.scatter_rows(tensors.get(f"client.{name}"), table.of(value, len(own), x, folder))
        for name, value in steps.initial_client_state.items()
    }
    server = {name: shared(f"server.{name}", value) for name, value in steps.initial_server_state.items()}
    buffers = {name: shared(f"buffer.{name}", rows) for name, rows in problem.initial_buffers().items()}

    def of_kind(kind: str) -> Tables:
        tables = {}
        for name, (dtype, shape, on_host) in facts.get(kind, {}).items():
            held = shared(f"{kind}.{name}", torch.zeros(shape, dtype=getattr(torch, dtype), device=x.device))
            tables[name] = held.cpu() if on_host else held
        return tables

    optimizer, noise = of_kind("optimizer"), of_kind("noise")
    return State(facts["round"], shared("x", x), clients, server, buffers, facts["messages"], optimizer, noise)


def tensor_forms(tables: Tables) -> dict[str, tuple[str, list[int], bool]]:
    """Return what a checkpoint states about each tensor: its type, its shape and whether it is in host memory."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu")
        for name, value in tables.items()
    }


def checkpoint_tensors(state: State, clients: int, communicator: Communicator) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, in the same form as in a single process; only those of rank 0 are used.

    The same state gives the same file, so that saving a round twice does not invalidate the checksum in latest.json.
    """
    held = {"x": state.x, **{f"server.{name}": value for name, value in state.server.items()}}
    held |= {f"optimizer.{name}": value for name, value in state.optimizer.items()}
    held |= {f"noise.{name}": value for name, value in state.noise.items()}
    for name, rows in state.clients.items():
        whole_table = communicator.gather_rows(rows, clients)
        held |= {f"client.{name}": whole_table} if whole_table is not None else {}
    return held | {f"buffer.{name}": rows for name, rows in gather_buffers(state.buffers, communicator).items()}


def checkpoint_size(state: State, clients: int) -> int:
    """Return about how many bytes a checkpoint takes."""
    held = [state.x, *state.server.values(), *state.optimizer.values(), *state.noise.values()]
    rows = sum(table[0].numel() * table.element_size() for table in state.clients.values() if len(table))
    return sum(one.numel() * one.element_size() for one in held) + clients * rows
