"""The shared pass as an engine: blocks of clients in one forward and backward pass, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import binary_loss
from ...problems.client_data import ResidentRecords
from ...problems.objective import Buffers
from ...problems.problem import Problem
from ...sampling.batches import Batches
from ..batch_feed import BatchFeed
from ..cuda_graphs import MOST, CudaGraphs
from ..engine import Block
from ..precision import Precision, autocast
from .inputs import InputCache, prepare_inputs
from .rules import RefuseValueAccess, convert, refuse_foreign_code

_BLOCK_FLOATS = {"cpu": 2**23, "cuda": 2**28}  # numbers in a block of gradients
_BLOCK_VALUES = {"cpu": 2**22, "cuda": 2**24}  # numbers in a block of inputs; activations are proportional to it
_LEFT_OUT = -100  # the target of records that cross entropy ignores
_SMALL_GPU = 2**34  # bytes of GPU memory that these block sizes suit; larger GPUs get larger blocks


class SharedEngine:
    """Computes every client's gradient in one pass over all batches, for models that the rules cover."""

    name = "shared"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: Batches | None,
        seed: int,
        precision: Precision = "tf32",
        *,
        private: bool = False,
    ) -> None:
        """Raises `NoRule` if a layer has no rule, or if a `private` run must not show it several clients' records."""
        if private:
            refuse_foreign_code(problem)
        self._problem, self._records, self._precision = problem, records, precision
        self._model, self._sink = convert(problem)
        self._feed = BatchFeed(problem, records, batches, seed)
        device = problem.x0.device
        kind = device.type if device.type in _BLOCK_FLOATS else "cpu"
        room = torch.cuda.get_device_properties(device).total_memory // _SMALL_GPU if kind == "cuda" else 1
        values = records.inputs[0].numel()
        typical = float(batches.expected.mean()) if batches is not None else float(records.sizes.double().mean())
        by_grads = int(_BLOCK_FLOATS[kind] // len(problem.x0) * typical)
        self._block = max(1, min(by_grads, _BLOCK_VALUES[kind] * max(1, room) // values))
        self._plain = problem.loss in (F.cross_entropy, binary_loss)
        # Cross entropy ignores records with target −100 and divides by the number of the others. In a private run, one
        # client's targets must not decide how the losses of other clients are computed.
        classes = problem.loss is F.cross_entropy and not records.targets.is_floating_point()
        self._leaves_out = classes and (private or bool((records.targets == _LEFT_OUT).any()))
        self._everyone: tuple[Tensor, ...] | None = None
        self._kept = InputCache(problem, records, whole=batches is None)
        self._seen = False  # whether the model has run without reading values
        self._grads = torch.empty(0, 0)
        self._graphs = CudaGraphs() if device.type == "cuda" else None

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return f"{self.name}, blocks of {self._block}"

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def shrink(self) -> bool:
        """Make blocks smaller after running out of memory; returns False if they cannot be smaller."""
        self._grads, self._graphs = torch.empty(0, 0), (CudaGraphs() if self._graphs is not None else None)
        self._sink.clear()
        self._kept.forget()
        self._block //= 2
        self._everyone = None
        return self._block > 0

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        groups = self._groups(clients, full)
        for group in groups:
            numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
            block = Block.of(group, self._room(x, len(group)), x.new_empty(0))
            ready = None
            if clients is None and len(groups) <= MOST:  # each group has its own graph
                make = partial(prepare_inputs, self._problem, self._records.inputs, numbers, None, x.dtype)
                ready = self._kept.of(group, numbers.numel(), x.dtype, make)
            losses = self._run(x, buffers, block, numbers, uniforms, ready)
            yield Block(block.clients, block.grads, losses, block.rows)

    def _groups(self, clients: Tensor | None, full: bool) -> Sequence[Tensor]:
        """Return the clients of each block; for rounds in which all clients take part they are computed once."""
        if clients is not None and not len(clients):
            return ()
        if clients is not None or full:
            chosen = torch.arange(self._problem.clients) if clients is None else clients
            return tuple(self._feed.groups(chosen, self._block, full=full))
        if self._everyone is None:
            self._everyone = tuple(self._feed.groups(torch.arange(self._problem.clients), self._block, full=False))
        return self._everyone

    def _room(self, x: Tensor, count: int) -> Tensor:
        if len(self._grads) < count or self._grads.dtype != x.dtype:
            self._grads = x.new_empty(count, len(x))
        return self._grads[:count]

    def _run(
        self,
        x: Tensor,
        buffers: Buffers,
        block: Block,
        numbers: Tensor,
        uniforms: Tensor | None,
        ready: Tensor | None,
    ) -> Tensor:
        fixed = [x, block.grads, *buffers.values(), *([ready] if ready is not None else [])]
        moving = [numbers, *([uniforms] if uniforms is not None else [])]
        if not isinstance(block.rows, slice):
            moving.append(block.rows)
        same = block.rows if isinstance(block.rows, slice) else "rows"

        def compute(*inputs: Tensor) -> Tensor:
            rows = inputs[-1] if not isinstance(block.rows, slice) else block.rows
            drawn = inputs[1] if uniforms is not None else None
            with nullcontext() if self._seen else RefuseValueAccess():
                losses = self._pass(x, buffers, rows, block.grads, inputs[0], drawn, ready)
            self._seen = True
            return losses

        if self._graphs is None:
            return compute(*moving)
        return self._graphs.run(compute, moving, fixed, str(same), buffers)

    def _pass(
        self,
        x: Tensor,
        buffers: Buffers,
        rows: Tensor | slice,
        grads: Tensor,
        numbers: Tensor,
        uniforms: Tensor | None,
        ready: Tensor | None,
    ) -> Tensor:
        """Fill `grads` and the rows of `buffers`, and return the losses [c]; `ready` are cached inputs."""
        problem, sink = self._problem, self._sink
        c = len(numbers)
        if ready is None:
            ready = prepare_inputs(problem, self._records.inputs, numbers, uniforms, x.dtype)
        targets = self._records.targets[numbers]
        own = {name: values[rows] for name, values in buffers.items()}
        sink.fill(x, grads, own)
        self._model.train()
        with torch.enable_grad(), autocast(x.device, self._precision):
            outputs = self._model(ready)
            losses = self._losses(outputs, targets, c)
            losses.sum().backward()
        sink.finish()
        if not isinstance(rows, slice):
            for name, values in buffers.items():
                values[rows] = own[name]
        base, slope = problem.penalised(x)
        if slope is not None:
            grads += slope
        return losses.detach().to(x.dtype) + base

    def _losses(self, outputs: Tensor, targets: Tensor, clients: int) -> Tensor:
        """Return the mean loss of every client."""
        if self._plain and outputs.ndim <= 2:
            flat = targets.flatten(0, 1)
            each = (
                F.cross_entropy(outputs, flat, reduction="none")
                if self._problem.loss is F.cross_entropy
                else F.binary_cross_entropy_with_logits(outputs, flat.to(outputs), reduction="none")
            )
            each = each.view(clients, -1)
            return each.sum(1) / (targets != _LEFT_OUT).flatten(1).sum(1) if self._leaves_out else each.mean(1)
        split = outputs.view(clients, -1, *outputs.shape[1:])
        return torch.stack([self._problem.loss(own, target) for own, target in zip(split, targets, strict=True)])
