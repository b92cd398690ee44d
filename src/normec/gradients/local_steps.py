"""Local steps as an engine: it yields the clients' updates where other engines yield gradients.

After the first local step every client has a model of its own. So the engines below this one compute gradients at a
point for each client: one client after the other (`OneByOne`, for every model and every engine), or all together
(`BatchedEngine` by vmap, `LinearEngine` in closed form).

Local step j of round k draws what round k · K_i + j of a run without local steps draws, K_i being the client's number
of steps: batches go on where the last round left off, and everything random remains a function of the seed, the client,
the round and j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..algorithms.local_steps import LocalSteps
from ..problems.objective import Buffers, Objective
from ..sampling.batches import Batches, BatchSource
from ..system.devices import upload
from .cuda_graphs import CudaGraphs
from .engine import Block, Engine, copies_of
from .loop import LoopEngine
from .precision import Precision

_BLOCK_FLOATS = 2**24
Correction = Callable[[Tensor], Tensor]  # the numbers of some clients → what is added to their gradients, [c, d]


class PointEngine(Engine, Protocol):
    """An engine that also computes the gradient of every client at a point of its own."""

    @property
    def variant(self) -> str: ...

    @property
    def same_records(self) -> bool:
        """Whether `batch` is the same for every step."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether `gradients_at` launches the same kernels for every batch, all of them on tensors of `batch`."""
        ...

    def shrink(self) -> bool:
        """Make groups smaller after running out of memory; returns False if they cannot be smaller."""
        ...

    def groups(self, clients: Tensor) -> Sequence[Tensor]:
        """Return the clients in groups that are computed together."""
        ...

    def batch(self, clients: Tensor, step: int | Tensor, *, everyone: bool) -> Sequence[Tensor]:
        """Return what the clients of one group draw for a step.

        `step` is one number, or one for each client; `everyone` is that of `BatchFeed.tables`.
        """
        ...

    def gradients_at(
        self, points: Tensor, buffers: Buffers, rows: Tensor | slice, batch: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return losses ``[c]`` and gradients at the clients' points ``[c, d]``, and update `buffers` at `rows`."""
        ...


class OneByOne:
    """Any engine, asked for one client at a time."""

    same_records = recordable = False

    def __init__(self, engine: Engine, dimension: int) -> None:
        self._engine, self._block = engine, max(1, _BLOCK_FLOATS // dimension)
        self.blocks = engine.blocks

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def variant(self) -> Any:
        """The variant of the engine; None if it does not say what its bits depend on."""
        return getattr(self._engine, "variant", None)

    @property
    def threads(self) -> int:
        return self._engine.threads

    @property
    def copies(self) -> Sequence[nn.Module]:
        return copies_of(self._engine)

    def shrink(self) -> bool:
        return False

    def groups(self, clients: Tensor) -> Sequence[Tensor]:
        return tuple(clients.split(self._block))

    def batch(self, clients: Tensor, step: int | Tensor, *, everyone: bool) -> Sequence[Tensor]:  # noqa: ARG002
        return clients, torch.as_tensor(step).expand(len(clients))

    def gradients_at(
        self,
        points: Tensor,
        buffers: Buffers,
        rows: Tensor | slice,  # noqa: ARG002
        batch: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        clients, steps = batch
        grads, losses = torch.empty_like(points), points.new_empty(len(points))
        for i, step in enumerate(steps.tolist()):
            (block,) = self._engine.blocks(points[i], buffers, step, clients[i : i + 1])
            losses[i], grads[i] = block.losses[0], block.grads[0]
        return losses, grads


class LocalEngine:
    """The updates that clients reach by local steps, with the gradients of another engine."""

    def __init__(self, engine: PointEngine, local: LocalSteps, counts: Tensor) -> None:
        """`counts`: the number of steps of every client."""
        self._engine, self._local, self._counts = engine, local, counts
        self._reused: dict[str, Tensor] = {}
        self._graphs = CudaGraphs("a local step")

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return self._engine.variant

    @property
    def threads(self) -> int:
        return self._engine.threads

    @property
    def copies(self) -> Sequence[nn.Module]:
        return copies_of(self._engine)

    def shrink(self) -> bool:
        """Make groups smaller after running out of memory; returns False if they cannot be smaller."""
        self._reused, self._graphs = {}, CudaGraphs("a local step")
        return self._engine.shrink()

    def blocks(
        self,
        x: Tensor,
        buffers: Buffers,
        round: int,
        clients: Tensor | None = None,
        *,
        full: bool = False,
        correction: Correction | None = None,
    ) -> Iterator[Block]:
        """Yield updates, with losses and gradients at x on the batch of the first step.

        With `full`, gradients at x take the updates' place. `correction` returns what is added to every gradient of
        some clients' local steps.
        """
        if full:
            yield from self._engine.blocks(x, buffers, round, clients, full=True)
            return
        everyone = torch.arange(len(self._counts)) if clients is None else clients
        for group in self._engine.groups(everyone) if len(everyone) else ():
            yield self._update(x, buffers, round, group, correction, everyone=clients is None)

    def _update(
        self, x: Tensor, buffers: Buffers, round: int, group: Tensor, correction: Correction | None, *, everyone: bool
    ) -> Block:
        """Make all steps of a group of clients.

        Clients with more steps come first, so that those with steps left are always the first rows of the tables.
        """
        rows, counts = Block.of(group, x, x).rows, self._counts[group]
        alike = bool((counts == counts[0]).all())
        order = torch.arange(len(group)) if alike else counts.argsort(descending=True, stable=True)
        group_rows, ordered, counts = rows, group[order], counts[order]
        if not alike:
            rows = upload(ordered, x.device)
        moved, state = self._tables(x, len(group))
        shift = correction(ordered) if correction is not None else None
        batch: Sequence[Tensor] = ()
        losses = start = x
        for j in range(int(counts[0])):
            active = len(group) if alike else int((counts > j).sum())
            if j == 0 or not self._engine.same_records or active < len(moved):
                step = round * int(counts[0]) + j if alike else round * counts[:active] + j
                batch = self._engine.batch(ordered[:active], step, everyone=everyone and alike)
            if not alike:
                moved, state = moved[:active], {name: table[:active] for name, table in state.items()}
            whose = rows if isinstance(rows, slice) else rows[:active]
            added = shift[:active] if shift is not None else None
            found, grads = self._step(x, moved, state, buffers, whose, batch, j + 1, added)
            if j == 0:  # the next step overwrites what a CUDA graph returns
                losses, start = (found.clone(), grads.clone()) if x.is_cuda else (found, grads)
        update = self._local.update(self._reused["moved"][: len(group)], counts)
        if not alike:
            back = upload(order.argsort(), x.device)
            update, losses, start = update[back], losses[back], start[back]
        return Block(group, update, losses, group_rows, start_grads=start)

    def _tables(self, x: Tensor, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return y − x and the local optimizer's state at the start, always in the same memory, for CUDA graphs."""
        held = self._reused.get("moved")
        if held is None or len(held) < count or held.dtype != x.dtype or held.device != x.device:
            moved = x.new_empty(count, len(x))
            self._reused = {"moved": moved, **self._local.state(moved)}
        tables = {name: table[:count].zero_() for name, table in self._reused.items()}
        return tables.pop("moved"), tables

    def _step(
        self,
        x: Tensor,
        moved: Tensor,
        state: dict[str, Tensor],
        buffers: Buffers,
        rows: Tensor | slice,
        batch: Sequence[Tensor],
        number: int,
        shift: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Make local step `number` of some clients, on a GPU as one CUDA graph where the engine allows it."""
        if shift is not None or not (x.is_cuda and self._engine.recordable):
            losses, grads = self._engine.gradients_at(x + moved, buffers, rows, batch)
            self._local.step(moved, grads if shift is None else grads + shift, state, number)
            return losses, grads

        def compute(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            drawn, at = inputs[1 : 1 + len(batch)], rows if isinstance(rows, slice) else inputs[-1]
            losses, grads = self._engine.gradients_at(x + moved, buffers, at, drawn)
            self._local.step(moved, grads, state, inputs[0])
            return losses, grads

        changed = {"moved": moved, **state, **{f"buffer {name}": table for name, table in buffers.items()}}
        moving = (torch.full((), float(number), device=x.device), *batch, *(() if isinstance(rows, slice) else (rows,)))
        named = str(rows) if isinstance(rows, slice) else "rows"
        return self._graphs.run(compute, moving, [x, *changed.values()], named, changed)


class LocalLoop(LocalEngine):
    """The reference of local steps: one client after the other, by plain autograd."""

    def __init__(self, loop: LoopEngine, problem: Objective, local: LocalSteps, counts: Tensor) -> None:
        super().__init__(OneByOne(loop, len(problem.x0)), local, counts)
        self._loop, self.divisors, self.precision = loop, loop.divisors, loop.precision

    def of(self, problem: Objective, precision: Precision = "tf32") -> LocalLoop:
        """Return the same engine for another problem, to compare engines; by default without autocast."""
        return LocalLoop(self._loop.of(problem, precision), problem, self._local, self._counts)


def steps_of(local: LocalSteps, problem: Objective, batches: BatchSource | None) -> Tensor:
    """Return the number of local steps of every client, ``[n]``."""
    return local.counts(problem.clients, batches.steps if isinstance(batches, Batches) else None)
