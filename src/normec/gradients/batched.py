"""All clients at once by `torch.func`: for small models with a layer that the shared pass has no rule for.

It also computes gradients at a point for each client, for local steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches
from .batch_feed import BatchFeed
from .engine import Block, BlockEngine
from .own_vmap_rules import RefuseOwnVmapRules
from .own_weights import RULES, own_weights
from .precision import Precision, autocast
from .restored import UserState, forgetful, state_of
from .shared.slots import NoRule

_BLOCK_FLOATS = 2**22
_LOCAL_BLOCK_FLOATS = {"cpu": 2**22, "cuda": 2**26}  # numbers in a table of the clients' own models


class BatchedEngine(BlockEngine):
    """Applies vmap over clients to the gradient of one client; buffers are passed and returned as tensors."""

    name = "batched"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: Batches | None,
        seed: int,
        precision: Precision = "tf32",
        *,
        local: bool = False,
        private: bool = False,
    ) -> None:
        """`local`: whether clients make local steps, at points of their own.

        In a `private` run code of the user's own starts every block, and every local step, as it was before.
        """
        self._problem, self._records, self._precision = problem, records, precision
        self._augmented = forgetful(problem).augmented_by_client if private else problem.augmented_by_client
        self._private = private
        self._feed = BatchFeed(problem, records, batches, seed)
        typical = float(batches.expected.mean()) if batches is not None else float(records.sizes.double().mean())
        most = _LOCAL_BLOCK_FLOATS.get(problem.x0.device.type, _BLOCK_FLOATS) if local else _BLOCK_FLOATS
        self._block = max(1, int(most // len(problem.x0) * typical))
        self.same_records = batches is None and problem.augment is None
        self.recordable = True

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        everyone = torch.arange(self._problem.clients) if clients is None else clients
        for group in self._feed.groups(everyone, self._block, full=full) if len(everyone) else ():
            numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
            block = Block.of(group, x.new_empty(0), x.new_empty(0))
            losses, grads = self._gradients(x, buffers, block.rows, numbers, uniforms)
            yield Block(block.clients, grads, losses, block.rows)

    def groups(self, clients: Tensor) -> Sequence[Tensor]:
        """Return the clients in groups that are computed together."""
        return tuple(self._feed.groups(clients, self._block, full=False))

    def batch(self, clients: Tensor, step: int | Tensor, *, everyone: bool) -> Sequence[Tensor]:
        """Return what the clients of one group draw for a step: record numbers, and the augmentation's uniforms."""
        numbers, uniforms = self._feed.tables(clients, step, everyone=everyone)
        return (numbers,) if uniforms is None else (numbers, uniforms)

    def gradients_at(
        self, points: Tensor, buffers: Buffers, rows: Tensor | slice, batch: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return losses ``[c]`` and gradients at the clients' points ``[c, d]``, and update `buffers` at `rows`."""
        return self._gradients(points, buffers, rows, batch[0], batch[1] if len(batch) > 1 else None)

    def _gradients(
        self, x: Tensor, buffers: Buffers, rows: Tensor | slice, numbers: Tensor, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return losses and gradients at x, which is ``[d]`` for all clients or ``[c, d]``."""
        inputs, targets = self._records.inputs[numbers], self._records.targets[numbers]
        inputs = self._augmented(inputs, uniforms)
        own = {name: table[rows].clone() for name, table in buffers.items()}
        state = state_of(self._problem) if self._private else UserState()  # a callback may exchange the loss
        with state.restored(), autocast(x.device, self._precision):
            self._problem.model.train()
            grads, (losses, after) = self._each(x, own, inputs, targets)
        for name, table in buffers.items():
            table[rows] = after[name]
        return losses.to(x.dtype), grads

    def _each(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        problem, shared = self._problem, x.ndim == 1

        def one(point: Tensor, own: Buffers, item: Tensor, target: Tensor) -> tuple[Tensor, Buffers]:
            held = dict(own)
            if problem.transform is not None:
                item = problem.transform(item)
            if item.is_floating_point():
                item = item.to(point.dtype)
            outputs = functional_call(problem.model, {**problem.unflatten(point), **held}, (item,))
            value = problem.loss(outputs, target)
            return value + problem.penalty(point) if problem.penalty is not None else value, held

        gradient = grad_and_value(one, has_aux=True)
        dimensions = (None if shared else 0, 0, 0, 0)
        each = vmap(gradient, in_dims=dimensions, randomness="error")
        with RefuseOwnVmapRules(NoRule, RULES), nullcontext() if shared else own_weights():
            grads, (losses, after) = each(x, buffers, inputs, targets)
        return grads, (losses, after)
