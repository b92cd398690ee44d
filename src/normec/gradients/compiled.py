"""Client by client with a compiled model, for long runs of large models on a CPU, where compiling saves time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches
from ..sampling.random_streams import derive_seed, seed_generators
from .batch_feed import BatchFeed
from .engine import Block, BlockEngine
from .model_copy import ModelCopy
from .precision import Precision
from .restored import forgetful

_BLOCK_FLOATS = 2**24
# Rough constants: float32 operations per second of a CPU, the seconds that compiling takes, and the share of time that
# it saves. They are not measured, so that the choice is always the same: another engine would give other bits.
_RATE, _COMPILING, _SAVED = 4e10, 60.0, 0.3


class CompiledEngine(BlockEngine):
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
        private: bool = False,
    ) -> None:
        self._problem, self._seed = forgetful(problem) if private else problem, seed
        self._feed = BatchFeed(problem, records, batches, seed)
        self._copy = ModelCopy(problem, records, precision, private=private)
        if compiling:
            # Dropout must draw the same numbers as in the loop, not numbers of the compiler.
            self._copy.forward = torch.compile(self._copy.model, dynamic=False, options={"fallback_random": True})
        self._block = max(1, _BLOCK_FLOATS // len(problem.x0))

    @property
    def copies(self) -> Sequence[nn.Module]:
        """The copies of the model that are called in its place."""
        return [self._copy.model]

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
                    self._copy.set(x)  # for every client, because a model may write to its parameters
                    drawn = uniforms[i] if uniforms is not None else None
                    losses[i] = self._copy.gradient(own, numbers[i], drawn, grads[i])
                yield Block.of(group, grads if slope is None else grads.add_(slope), losses + base)


def pays_back(problem: Problem, records: float, rounds: int) -> bool:
    """Whether compiling saves more time than it takes, estimated from the counted operations of a gradient."""
    seconds = operations(problem) * records * problem.clients * rounds / _RATE
    return bool(seconds * _SAVED > _COMPILING)


def operations(problem: Problem) -> int:
    """Return the floating-point operations of one record's gradient, counted on a record of zeros."""
    return sum(operations_by_kind(problem).values())


def operations_by_kind(problem: Problem) -> dict[str, int]:
    """Return the floating-point operations of one record's gradient for each operation of PyTorch that has many."""
    from torch.utils.flop_counter import FlopCounterMode

    if not isinstance(problem.records, ResidentRecords):
        return {}
    inputs = torch.zeros_like(problem.records.inputs[:1])
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know the operation of a whole encoder layer
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            problem.model.eval()
            problem.outputs(problem.x0, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return {str(kind): 3 * int(count) for kind, count in counter.get_flop_counts().get("Global", {}).items()}
