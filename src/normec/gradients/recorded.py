"""Client by client on a GPU, recorded as one CUDA graph: for models that the shared pass has no rule for.

The loop over a block of clients is plain autograd and needs no rules. Python only takes part in the recording: the
replay launches the same kernels for new records. Some clients run side by side, on streams of their own, where no code
of the user's own could write to the same memory for two of them.

A replay repeats what Python did once. Therefore a model is only recorded if it does the same every time, as far as
this can be seen: it reads no values from the device, draws no numbers from generators of the host, and leaves no plain
attribute changed. The first replay for other records than those of the recording is compared with a plain pass.

Dropout draws from torch's global generator, which the loop seeds for every client and round. A recording reads the
state of a generator when it is replayed. So every client of a block has its own generator, which takes the place of the
global one while the client is recorded, and is seeded before each replay: the numbers are those of the loop.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms.operators import norms
from ..data.augment import treats_records_alone
from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches
from ..sampling.random_streams import derive_seed, seed_generators
from ..system.devices import upload
from .batch_feed import BatchFeed
from .cuda_graphs import CudaGraphs
from .engine import Block, BlockEngine, GradientTable
from .model_copy import ModelCopy
from .own_code import has_own_code
from .precision import Precision
from .restored import forgetful

_BLOCK_FLOATS = 2**28  # numbers in a block of gradients
_BLOCK_CLIENTS = 32  # clients in a recording
_STREAMS = 5  # clients that run side by side
_CLOSE = 1e-2  # relative; kernels that add in any order give other bits each time


class RecordedEngine(BlockEngine):
    """The loop over clients with copies of the model, as a CUDA graph where it can be recorded."""

    name = "recorded"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: Batches | None,
        seed: int,
        precision: Precision = "tf32",
        *,
        private: bool = False,
        recording: bool = True,
    ) -> None:
        """In a `private` run, no two clients run a model of the user's own at the same time.

        It starts every client as it was before (`restored`). Without `recording` every pass is a plain one.
        """
        self._problem, self._forgetful, self._seed = problem, forgetful(problem) if private else problem, seed
        self._feed = BatchFeed(problem, records, batches, seed)
        typical = float(batches.expected.mean()) if batches is not None else float(records.sizes.double().mean())
        self._block = int(max(1, min(_BLOCK_CLIENTS, _BLOCK_FLOATS // len(problem.x0))) * typical)
        device = problem.x0.device
        streams = _STREAMS if device.type == "cuda" and may_run_side_by_side(problem, private) else 1
        self._copies = [ModelCopy(problem, records, precision, private=private) for _ in range(streams)]
        self._streams = [torch.cuda.Stream(device) for _ in self._copies] if device.type == "cuda" else []
        self._generators = _Generators(device)
        self._graphs = _graphs() if device.type == "cuda" and recording else None
        self._calls = Counter[tuple[int, ...]]()
        self._grads = GradientTable()

    @property
    def copies(self) -> Sequence[nn.Module]:
        """The copies of the model that are called in its place."""
        return [copy.model for copy in self._copies]

    def shrink(self) -> bool:
        self._grads, self._graphs = GradientTable(), (_graphs() if self._graphs is not None else None)
        self._calls.clear()
        return super().shrink()

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        everyone = torch.arange(self._problem.clients) if clients is None else clients
        for group in self._feed.groups(everyone, self._block, full=full) if len(everyone) else ():
            numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
            block = Block.of(group, self._grads.rows(x, len(group)), x.new_empty(0))
            rows = block.rows if len(group) == self._problem.clients else upload(group, x.device)
            seeds = [derive_seed(self._seed, "model", client, round) for client in group.tolist()]
            losses = self._run(_Work(x, buffers, rows, numbers, uniforms, block.grads), seeds)
            yield Block(block.clients, block.grads, losses, block.rows)

    def _run(self, work: _Work, seeds: Sequence[int]) -> Tensor:
        """Fill the gradients and buffers of a block and return its losses."""
        shape = tuple(work.numbers.shape)
        self._calls[shape] += 1
        if self._calls[shape] == 1:
            return self._first_pass(work, seeds)
        if self._graphs is None or self._graphs.off:
            return self._pass(work, seeds)
        if self._calls[shape] == 2:
            return self._second_pass(work, seeds, self._graphs)
        parts: dict[str, object] = {"numbers": work.numbers, "uniforms": work.uniforms, "rows": work.rows}
        moving = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        fixed = [work.x, work.grads, *work.buffers.values()]

        def compute(*inputs: Tensor) -> Tensor:
            given: dict[str, Any] = dict(zip(moving, inputs, strict=True))
            return self._pass(replace(work, **given), seeds)

        generators = self._generators.of(len(seeds))
        seed = partial(self._generators.seed, seeds)
        recorded = partial(
            self._graphs.run, compute, list(moving.values()), fixed, "block", work.buffers, generators, seed
        )
        # The third call records the pass and replays it for the same records, so the fourth replays it for new ones.
        return self._compared(work, seeds, recorded) if self._calls[shape] == 4 else recorded()

    def _first_pass(self, work: _Work, seeds: Sequence[int]) -> Tensor:
        """Make a plain pass that shows whether the model draws random numbers and leaves its parameters alone."""
        losses = self._pass(work, seeds)
        self._generators.unused = self._generators.unused and self._generators.untouched(len(seeds))
        if not all(copy.holds(work.x) for copy in self._copies[: len(seeds)]):
            raise RuntimeError("the model changes its own parameters")
        return losses

    def _second_pass(self, work: _Work, seeds: Sequence[int], graphs: CudaGraphs) -> Tensor:
        """Make a plain pass that shows whether the model's Python code may do something else in the next call."""
        watched = [copy.model for copy in self._copies]
        watched += [part for part in (self._problem.loss, self._problem.transform) if isinstance(part, nn.Module)]
        attributes, drawn = _attributes(watched), _host_generators()
        losses = self._pass(work, seeds)
        fresh = torch.Generator().manual_seed(seeds[-1]).get_state()  # as it was before the last client
        if _attributes(watched) != attributes:
            graphs.give_up("it keeps values in plain attributes")
        elif _host_generators() != drawn or not torch.equal(torch.default_generator.get_state(), fresh):
            graphs.give_up("it draws random numbers on the host")
        return losses

    def _compared(self, work: _Work, seeds: Sequence[int], recorded: Callable[[], Tensor]) -> Tensor:
        """Replay the recording for other records than it was made with, and compare the gradients with a plain pass."""
        own = {name: table.clone() for name, table in work.buffers.items()}
        plain = replace(work, buffers=own, grads=torch.empty_like(work.grads))
        self._generators.seed(seeds)
        self._pass(plain, seeds)
        losses = recorded()
        apart = norms(work.grads - plain.grads)
        if bool((apart > _CLOSE * norms(plain.grads)).any()):
            raise RuntimeError("the model does something else from one call to the next")
        return losses

    def _pass(self, work: _Work, seeds: Sequence[int]) -> Tensor:
        """Run the plain loop over a block of clients, on several streams of a GPU."""
        own = {name: table[work.rows] for name, table in work.buffers.items()}
        losses = work.x.new_empty(len(seeds))
        with _side_by_side(self._streams):
            for i, seed in enumerate(seeds):
                lane = i % len(self._copies)
                stream = torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()
                rows = {name: table[i] for name, table in own.items()}
                drawn = work.uniforms[i] if work.uniforms is not None else None
                with stream, self._generators.standing_in(i, seed):
                    self._copies[lane].set(work.x)  # for every client, because a model may write to its parameters
                    losses[i] = self._copies[lane].gradient(rows, work.numbers[i], drawn, work.grads[i])
        if not isinstance(work.rows, slice):
            for name, table in work.buffers.items():
                table[work.rows] = own[name]
        base, slope = self._forgetful.penalised(work.x)
        if slope is not None:
            work.grads.add_(slope)
        return losses + base


def may_run_side_by_side(problem: Problem, private: bool) -> bool:
    """Whether clients may be computed at the same time: code of the user's own may write to the same memory for each.

    All clients share the transform and the loss, which may keep a table and fill it for every batch. Every copy of the
    model has attributes of its own, but the code of a module may also write to memory that is no attribute. In a
    private run, where one client's data must not reach another's message, such a model runs on one stream as well.
    """
    shared = treats_records_alone(problem.transform) and treats_records_alone(problem.augment)
    return shared and not has_own_code(problem.loss) and not (private and has_own_code(problem.model))


def _graphs() -> CudaGraphs:
    """Return graphs that are captured at the first call: `RecordedEngine` has made its plain passes before."""
    return CudaGraphs(patience=1)


@contextmanager
def _side_by_side(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Begin the streams after what was launched before, and end them before what is launched afterwards."""
    if not streams:
        yield
        return
    here = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(here)
    yield
    for stream in streams:
        here.wait_stream(stream)


@dataclass(frozen=True)
class _Work:
    """A block of clients: where its inputs are and where its results go."""

    x: Tensor
    buffers: Buffers
    rows: Tensor | slice
    numbers: Tensor
    uniforms: Tensor | None
    grads: Tensor


class _Generators:
    """One generator per client of a block, which takes the place of the global one; on a CPU the global one serves."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._own = device, list[torch.Generator]()
        self.unused = True  # whether no client has drawn from its generator so far

    def of(self, count: int) -> Sequence[torch.Generator]:
        """Return the generators that a recording of `count` clients reads."""
        return () if self.unused else self._own[:count]

    def seed(self, seeds: Sequence[int]) -> None:
        """Set the generators as the loop sets the global one before each client."""
        if not self.unused:
            for generator, seed in zip(self._own, seeds, strict=False):
                generator.manual_seed(seed)

    def untouched(self, count: int) -> bool:
        """Whether nothing was drawn since the generators of `count` clients were seeded."""
        return all(generator.get_offset() == 0 for generator in self._own[:count])

    @contextmanager
    def standing_in(self, position: int, seed: int) -> Iterator[None]:
        """Let code that draws from the global generators draw the numbers of the client at `position`."""
        if self._device.type != "cuda":
            seed_generators(seed, self._device)
            yield
            return
        recording = torch.cuda.is_current_stream_capturing()
        if not recording:
            torch.default_generator.manual_seed(seed)
        while len(self._own) <= position:
            self._own.append(torch.Generator(self._device))
        if not recording:
            self._own[position].manual_seed(seed)
        elif self.unused:
            yield
            return
        everyones = torch.cuda.default_generators[self._device.index or 0]
        before = everyones.graphsafe_get_state()
        everyones.graphsafe_set_state(self._own[position])
        try:
            yield
        finally:
            everyones.graphsafe_set_state(before)


def _attributes(modules: Sequence[nn.Module]) -> list[object]:
    """Return the plain attributes of the modules by what can be compared: their values, or which objects they are."""
    plain = (int, float, str, bool, complex, bytes, type(None))
    return [
        (name, value if isinstance(value, plain) else (id(value), getattr(value, "_version", 0)))
        for module in modules
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]


def _host_generators() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's global generators."""
    return random.getstate(), pickle.dumps(np.random.get_state())
