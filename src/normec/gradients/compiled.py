"""Client by client with a compiled model, for long runs of large models on a CPU, where compiling saves time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches
from ..sampling.random_streams import derive_seed, seed_generators
from .batch_feed import BatchFeed
from .engine import Block
from .precision import Precision, autocast

_BLOCK_FLOATS = 2**24
# Rough constants: float32 operations per second of a CPU, the seconds that compiling takes, and the share of time that
# it saves. They are not measured, so that the choice is always the same: another engine would give other bits.
_RATE, _COMPILING, _SAVED = 4e10, 60.0, 0.3


class CompiledEngine:
    """The loop with a model that is compiled once, and images with channels last."""

    name = "compiled"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: Batches | None,
        seed: int,
        precision: Precision = "tf32",
        *,
        compiling: bool = True,
    ) -> None:
        self._problem, self._records, self._seed, self._precision = problem, records, seed, precision
        self._feed = BatchFeed(problem, records, batches, seed)
        self._model = copy.deepcopy(problem.model)
        if records.inputs.ndim == 4:
            self._model = self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._buffers = dict(self._model.named_buffers())
        self._forward: Callable[[Tensor], Tensor] = self._model
        if compiling:
            # Dropout must draw the same numbers as in the loop, not numbers of the compiler.
            self._forward = torch.compile(self._model, dynamic=False, options={"fallback_random": True})
        self._block = max(1, _BLOCK_FLOATS // len(problem.x0))

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return f"{self.name}, blocks of {self._block}"

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def shrink(self) -> bool:
        return False  # it already computes one client at a time

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        everyone = torch.arange(self._problem.clients) if clients is None else clients
        if not len(everyone):
            return
        base, slope = self._problem.penalised(x)
        for length in (lengths := self._feed.lengths(everyone, full=full)).unique().tolist():
            for group in everyone[lengths == length].split(self._block):
                numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
                grads, losses = x.new_empty(len(group), len(x)), x.new_empty(len(group))
                for i, client in enumerate(group.tolist()):
                    seed_generators(derive_seed(self._seed, "model", client, round), x.device)
                    own = {name: rows[client] for name, rows in buffers.items()}
                    self._set(x)  # for every client, because a model may write to its parameters
                    losses[i] = self._gradient(own, numbers[i], uniforms[i] if uniforms is not None else None, grads[i])
                yield Block.of(group, grads if slope is None else grads.add_(slope), losses + base)

    @torch.no_grad()
    def _set(self, x: Tensor) -> None:
        parts = x.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    def _gradient(self, buffers: Buffers, numbers: Tensor, uniforms: Tensor | None, grad: Tensor) -> Tensor:
        inputs, targets = self._records.inputs.index_select(0, numbers), self._records.targets[numbers]
        if self._problem.augment is not None and uniforms is not None:
            inputs = self._problem.augment(inputs, uniforms)
        inputs = self._problem.prepared(inputs, grad.dtype)
        with torch.no_grad():
            for name, held in self._buffers.items():
                held.copy_(buffers[name])
        self._model.train()
        with torch.enable_grad(), autocast(grad.device, self._precision):
            loss = self._problem.loss(self._forward(inputs), targets)
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            for name, held in self._buffers.items():
                buffers[name].copy_(held)
            flat = [
                g.reshape(-1) if g is not None else p.new_zeros(p.numel())
                for g, p in zip(found, self._parameters, strict=True)
            ]
            torch.cat(flat, out=grad)
        return loss.detach()


def pays_back(problem: Problem, records: float, rounds: int) -> bool:
    """Whether compiling saves more time than it takes: by the operations of a gradient, counted, not timed."""
    seconds = operations(problem) * records * problem.clients * rounds / _RATE
    return bool(seconds * _SAVED > _COMPILING)


def operations(problem: Problem) -> int:
    """Floating-point operations of one record's gradient, counted on no client's data."""
    from torch.utils.flop_counter import FlopCounterMode

    if not isinstance(problem.records, ResidentRecords):
        return 0
    inputs = torch.zeros_like(problem.records.inputs[:1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.model.eval()
        problem.outputs(problem.x0, inputs)
    return 3 * int(counter.get_total_flops())
