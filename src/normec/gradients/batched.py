"""All clients at once with `torch.func`, for small models with a layer for which the shared pass has no rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches
from .batch_feed import BatchFeed
from .engine import Block
from .precision import Precision, autocast

_BLOCK_FLOATS = 2**22


class BatchedEngine:
    """Applies vmap over clients to the gradient of one client; buffers are passed and returned as tensors."""

    name = "batched"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: Batches | None,
        seed: int,
        precision: Precision = "tf32",
    ) -> None:
        self._problem, self._records, self._precision = problem, records, precision
        self._feed = BatchFeed(problem, records, batches, seed)
        typical = float(batches.expected.mean()) if batches is not None else float(records.sizes.double().mean())
        self._block = max(1, int(_BLOCK_FLOATS // len(problem.x0) * typical))

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return f"{self.name}, blocks of {self._block}"

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def shrink(self) -> bool:
        """Make blocks smaller after running out of memory; returns False if they cannot be smaller."""
        self._block //= 2
        return self._block > 0

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        everyone = torch.arange(self._problem.clients) if clients is None else clients
        for group in self._feed.groups(everyone, self._block, full=full) if len(everyone) else ():
            numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
            inputs, targets = self._records.inputs[numbers], self._records.targets[numbers]
            inputs = self._problem.augmented_by_client(inputs, uniforms)
            block = Block.of(group, x.new_empty(0), x.new_empty(0))
            own = {name: rows[block.rows].clone() for name, rows in buffers.items()}
            self._problem.model.train()
            with autocast(x.device, self._precision):
                grads, (losses, after) = self._each(x, own, inputs, targets)
            for name, rows in buffers.items():
                rows[block.rows] = after[name]
            yield Block(block.clients, grads, losses.to(x.dtype), block.rows)

    def _each(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        problem = self._problem

        def one(point: Tensor, own: Buffers, item: Tensor, target: Tensor) -> tuple[Tensor, Buffers]:
            if problem.transform is not None:
                item = problem.transform(item)
            if item.is_floating_point():
                item = item.to(point.dtype)
            held = dict(own)
            outputs = functional_call(problem.model, {**problem.unflatten(point), **held}, (item,))
            value = problem.loss(outputs, target)
            return value + problem.penalty(point) if problem.penalty is not None else value, held

        gradient = grad_and_value(one, has_aux=True)
        grads, (losses, after) = vmap(gradient, in_dims=(None, 0, 0, 0), randomness="error")(
            x, buffers, inputs, targets
        )
        return grads, (losses, after)
