"""The shared pass as an engine: blocks of clients in one forward and backward pass, on a GPU as a CUDA graph.

A model whose layers all have rules runs on the records of all clients at once (`rules.ModuleModel`). Every other model
runs under vmap, with rules for operations (`operations.OperationModel`).

With a clip for each record, the gradients of single records take the place of the clients' gradients, and their clipped
sum is computed from what the backward pass leaves behind (`record_sums`). The model then runs on one record at a time,
by vmap, unless every module is known to treat records independently.

What a record adds is a function of this record and x, but its last bits may depend on the records beside it, because
one product adds up several records. That is a rounding like any other in a run that computes x itself. A party of a
federation, which receives x from others, must not rely on it: an x can be chosen so that a rounding decides between
a finite number and an overflow. So parties use `loop.clipped_gradient`, and this engine clips only for `train`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...problems.client_data import ResidentRecords
from ...problems.objective import Buffers
from ...problems.problem import Problem
from ...sampling.batches import Batches, BatchSource
from ...system.devices import upload
from ..batch_feed import BatchFeed
from ..cuda_graphs import MOST, CudaGraphs
from ..engine import Block, BlockEngine, GradientTable
from ..loop import RECORD_BLOCKS
from ..precision import Precision, autocast
from ..record_clip import RecordClip
from ..restored import UserState, forgetful, forgetful_part
from .compiled import Compilation, CompiledPass
from .inputs import InputCache, prepare_inputs
from .operations import OperationModel
from .record_sums import add_up, most_held, tables
from .rules import LEFT_OUT, ModuleModel, RefuseValueAccess, refuse_foreign_code
from .slots import NoRule, ParameterSlot

_BLOCK_FLOATS = {"cpu": 2**23, "cuda": 2**28}  # numbers in a block of gradients
_BLOCK_VALUES = {"cpu": 2**22, "cuda": 2**24}  # numbers in a block of inputs; activations are proportional to it
_TABLE_FLOATS = {"cpu": 2**26, "cuda": 2**30}  # numbers in the gradients of single records, by rules for operations
_FEWEST = 32  # records in a block at which a pass is efficient
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Padded = tuple[Tensor, Tensor | None, Tensor, Tensor]  # numbers, uniforms, which are present, weights
_SMALL_GPU = 2**34  # bytes of GPU memory that these block sizes suit; GPUs of twice the size and more get larger blocks


class SharedEngine(BlockEngine):
    """Computes every client's gradient in one pass over all batches."""

    name = "shared"

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: BatchSource | None,
        seed: int,
        precision: Precision = "tf32",
        rules: type[ModuleModel] | type[OperationModel] | None = None,
        *,
        private: bool = False,
        record_clip: RecordClip | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        """Raises `NoRule` if the model cannot run in a shared pass.

        By default the model has rules by module if every layer has one, and otherwise rules by operation; `rules`
        prescribes one of the two. In a `private` run, code of the user sees one client at a time, and with
        `record_clip` one record, and keeps nothing of it (`restored`). With `compilation`, rounds of the usual shapes
        run in a compiled pass.
        """
        self._problem, self._records, self._precision, self._clip = problem, records, precision, record_clip
        isolated = private or record_clip is not None
        self._model = _shared_model(problem, rules, isolated)
        self._state = UserState()
        if isolated:
            self._problem = forgetful(problem)
            # Rules by module are for modules of PyTorch and this library, which keep nothing but buffers.
            called = self._model.model if isinstance(self._model, OperationModel) else None
            self._state = UserState(problem.loss, model=called)
        self._sink = self._model.sink
        self._sink.by_record = record_clip is not None
        self._batches = batches
        self._divisors = records.sizes.double() if batches is None else batches.expected
        fixed = batches if isinstance(batches, Batches) else None
        self._feed = BatchFeed(problem, records, fixed, seed)
        device = problem.x0.device
        kind = device.type if device.type in _BLOCK_FLOATS else "cpu"
        twice = kind == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 2 * _SMALL_GPU
        values = records.inputs[0].numel()
        typical = float(self._divisors.mean())
        by_grads = int(_BLOCK_FLOATS[kind] // len(problem.x0) * typical)
        if record_clip is not None and isinstance(self._model, OperationModel):
            by_grads = min(by_grads, _TABLE_FLOATS[kind] // len(problem.x0))
        convolves = any(isinstance(module, _CONVOLUTIONS) for module in problem.model.modules())
        if record_clip is not None and kind == "cpu" and convolves:  # without a table they take much longer
            by_grads = min(by_grads, max(_FEWEST, most_held(device) // len(problem.x0)))
        self._block = max(1, min(by_grads, _BLOCK_VALUES[kind] * (2 if twice else 1) // values))
        if isinstance(self._model, ModuleModel):
            # Cross entropy ignores records with target −100 and divides by the number of the others. In a private run,
            # one client's targets must not decide how the losses of other clients are computed.
            self._model.leaves_out = private or bool((records.targets == LEFT_OUT).any())
            if isolated:
                self._model.loss_alone = forgetful_part(problem.loss)
        self._everyone: tuple[Tensor, ...] | None = None
        self._constant: dict[int, _Padded] = {}  # of the blocks of all clients, by their first client
        self._kept = InputCache(problem, records, whole=batches is None)
        self._seen = False  # whether the model has run without reading values
        self._grads = GradientTable()
        self._graphs = CudaGraphs() if device.type == "cuda" else None
        self._compilation, self._compiled = compilation, None
        if compilation is not None:
            self.name = "compiled"
            self._compiled = CompiledPass(self._sink, self._back_and_forth, problem.loss, compilation, record_clip)
            self._compiled.use(self._usual_shapes(compilation.drawn))

    @property
    def variant(self) -> str:
        """A graph that runs as it is uses other kernels than the pass that was traced."""
        failed = self._compiled is not None and self._compiled.failed
        return super().variant + (", traced" if failed else "")

    def shrink(self) -> bool:
        self._grads, self._graphs = GradientTable(), (CudaGraphs() if self._graphs is not None else None)
        self._sink.clear()
        self._kept.forget()
        self._everyone = None
        self._constant.clear()
        smaller = super().shrink()
        if self._compiled is not None and self._compilation is not None:
            self._compiled.use(self._usual_shapes(self._compilation.drawn) if smaller else ())
        return smaller

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        groups = self._groups(clients, full)
        for group in groups:
            block = Block.of(group, self._grads.rows(x, len(group)), x.new_empty(0))
            if self._clip is not None:
                losses = self._clipped(x, buffers, block, round, full, everyone=clients is None)
            else:
                numbers, uniforms = self._feed.tables(group, round, everyone=clients is None, full=full)
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
            return self._grouped(chosen, full)
        if self._everyone is None:
            self._everyone = self._grouped(torch.arange(self._problem.clients), full)
        return self._everyone

    def _grouped(self, clients: Tensor, full: bool) -> tuple[Tensor, ...]:
        if full or self._batches is None or isinstance(self._batches, Batches):
            return tuple(self._feed.groups(clients, self._block, full=full))
        return tuple(clients.split(max(1, int(self._block // self._divisors[clients].max().clamp_min(1)))))

    def _usual_shapes(self, drawn: int | None) -> list[tuple[int, int]]:
        """Return how many clients and records the blocks of a round have; none if that depends on the draw."""
        if not (self._batches is None or isinstance(self._batches, Batches)):
            return []
        everyone = torch.arange(self._problem.clients)
        lengths = self._feed.lengths(everyone, full=False)
        if drawn is not None and len(lengths.unique()) > 1:
            return []
        shapes = [(len(group), int(lengths[group[0]])) for group in self._grouped(everyone[:drawn], False)]
        if self._clip is None:
            return shapes
        return [  # none that is filled up or divided
            (clients, records)
            for clients, records in shapes
            if records % RECORD_BLOCKS[-1] == 0 and clients * records <= self._block
        ]

    def _clipped(self, x: Tensor, buffers: Buffers, block: Block, round: int, full: bool, *, everyone: bool) -> Tensor:
        """Fill the block's gradients with sums of clipped gradients, and return the losses.

        The records of a client that are too many for one pass are added up in several.
        """
        numbers, uniforms, present, weights = self._padded(block, round, full, everyone, x.dtype)
        base, slope = self._problem.penalised(x)
        losses = base.expand(len(block.clients)).clone()
        if not numbers.shape[1]:  # no client has drawn a record
            block.grads.zero_()
        step = max(1, self._block // len(block.clients))
        total = block.grads if numbers.shape[1] <= step else torch.zeros_like(block.grads)
        for start in range(0, numbers.shape[1], step):
            part = slice(start, start + step)
            drawn = uniforms[:, part].contiguous() if uniforms is not None else None
            given = numbers[:, part].contiguous(), drawn, None, weights[:, part].contiguous()
            losses += self._run(x, buffers, block, *given, whole=bool(present[:, part].all()))
            if total is not block.grads:
                total += block.grads
        if total is not block.grads:
            block.grads.copy_(total)
        if slope is not None:
            block.grads.add_(slope)
        return losses

    def _padded(self, block: Block, round: int, full: bool, everyone: bool, dtype: torch.dtype) -> _Padded:
        """Return what the clients of a block compute on, in a length that fits; the same tensors if nothing is drawn.

        One record more or less rarely changes that length, and with it how sums are rounded; and few graphs suffice.
        """
        fixed = self._batches is None or isinstance(self._batches, Batches)
        key = int(block.clients[0]) if everyone and fixed and not full else None
        known = self._constant.get(key) if key is not None else None
        if known is not None and self._batches is None and known[1] is None:
            return known
        if full or self._batches is None or isinstance(self._batches, Batches):
            numbers, uniforms = self._feed.tables(block.clients, round, everyone=everyone, full=full)
            lengths = torch.full((len(block.clients),), numbers.shape[1])
        else:
            numbers, lengths, uniforms = self._feed.padded(block.clients, self._batches, round)
        short = -numbers.shape[1] % RECORD_BLOCKS[-1]
        numbers = F.pad(numbers, (0, short))
        uniforms = None if uniforms is None else F.pad(uniforms, (0, 0, 0, short))
        if known is not None:
            return numbers, uniforms, *known[2:]
        divisors = self._divisors[block.clients] if not full else self._records.sizes[block.clients].double()
        present = torch.arange(numbers.shape[1]) < lengths[:, None]
        found = numbers, uniforms, present, upload((present / divisors[:, None]).to(dtype), numbers.device)
        if key is not None:
            self._constant[key] = found
        return found

    def _run(
        self,
        x: Tensor,
        buffers: Buffers,
        block: Block,
        numbers: Tensor,
        uniforms: Tensor | None,
        ready: Tensor | None,
        weights: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """`whole`: no weight is zero."""
        fixed = [x, block.grads, *buffers.values(), *([ready] if ready is not None else [])]
        rows = block.rows
        parts = {"numbers": numbers, "uniforms": uniforms, "weights": weights}
        parts["rows"] = None if isinstance(rows, slice) else rows
        moving = {name: part for name, part in parts.items() if part is not None}

        def compute(*inputs: Tensor) -> Tensor:
            given = dict(zip(moving, inputs, strict=True))
            at = given.get("rows", rows)
            with nullcontext() if self._seen else RefuseValueAccess():
                drawn, shares = given.get("uniforms"), given.get("weights")
                losses = self._pass(x, buffers, at, block.grads, given["numbers"], drawn, ready, shares, whole)
            self._seen = True
            return losses

        if self._graphs is None:
            return compute(*moving.values())
        named = f"{rows if isinstance(rows, slice) else 'rows'}, {whole}"
        return self._graphs.run(compute, list(moving.values()), fixed, named, buffers)

    def _pass(
        self,
        x: Tensor,
        buffers: Buffers,
        rows: Tensor | slice,
        grads: Tensor,
        numbers: Tensor,
        uniforms: Tensor | None,
        ready: Tensor | None,
        weights: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Fill `grads` and the rows of `buffers`, and return the losses [c]; `ready` are cached inputs.

        With `weights`, the gradients are weighted sums of the clipped gradients of single records, without the penalty;
        `whole` says that none of them is zero.
        """
        problem = self._problem
        targets = self._records.targets[numbers]
        if weights is not None:  # every record takes the place of a client
            numbers, targets = numbers.reshape(-1, 1), targets.flatten(0, 1)[:, None]
            uniforms = uniforms.flatten(0, 1)[:, None] if uniforms is not None else None
        if ready is None:
            ready = prepare_inputs(problem, self._records.inputs, numbers, uniforms, x.dtype)
        own = {name: values[rows] for name, values in buffers.items()}
        if weights is not None:
            losses = self._fill_clipped(x, grads, own, ready, targets, weights, whole).to(x.dtype).view_as(weights)
            return torch.where(weights == 0, 0, losses * weights).sum(1)
        losses = self._fill(x, grads, own, ready, targets)
        if not isinstance(rows, slice):
            for name, values in buffers.items():
                values[rows] = own[name]
        base, slope = problem.penalised(x)
        if slope is not None:
            grads += slope
        return losses.to(x.dtype) + base

    def _fill(self, x: Tensor, grads: Tensor, own: Buffers, ready: Tensor, targets: Tensor) -> Tensor:
        """Fill `grads` and update the buffers `own` of a block; returns the losses without the penalty."""
        if self._compiled is not None and self._compiled.suits(targets):
            losses = self._compiled.run(x, grads, own, ready, targets)
            if self._compiled.failed:
                self.name = SharedEngine.name
            return losses
        self._sink.fill(x, grads, own)
        losses = self._back_and_forth(ready, targets)
        self._sink.finish()
        return losses

    def _fill_clipped(
        self, x: Tensor, grads: Tensor, own: Buffers, ready: Tensor, targets: Tensor, weights: Tensor, whole: bool
    ) -> Tensor:
        """Fill `grads` with sums of clipped gradients; returns the losses of all records."""
        if self._clip is None:
            raise TypeError("there is no clip")
        if whole and self._compiled is not None and self._compiled.suits(weights):
            losses = self._compiled.run(x, grads, own, ready, targets, weights)
            if self._compiled.failed:
                self.name = SharedEngine.name
            return losses
        sink = self._sink
        sink.fill(x, grads, own)
        losses = self._back_and_forth(ready, targets)
        held = tables(sink.uses, weights)
        uses = {slot: [use.exact(x.dtype) for use in many] for slot, many in sink.uses.items() if slot not in held}
        add_up(uses, held, self._written, self._clip, weights, len(sink.slots), whole=whole)
        sink.finish()
        return losses

    def _back_and_forth(self, ready: Tensor, targets: Tensor, modes: Collection[type] = ()) -> Tensor:
        """Run the forward and backward pass into the filled sink, and return the losses.

        `modes` are dispatch modes of PyTorch that may be active.
        """
        with (
            self._state.restored(),
            torch.enable_grad(),
            autocast(ready.device, self._precision),
            self._model.guard(modes),
        ):
            losses = self._model.losses(ready, targets)
            losses.sum().backward()
        self._model.collect()
        return losses.detach()

    @staticmethod
    def _written(slot: ParameterSlot) -> Tensor:
        slot.written = True
        return slot.rows


def _shared_model(
    problem: Problem, rules: type[ModuleModel] | type[OperationModel] | None, isolated: bool
) -> ModuleModel | OperationModel:
    """Return the model with rules by module, or else by operation; raises `NoRule`.

    `isolated`: unknown code must not see several clients (or records) at once, which rules by module do not prevent.
    """
    if rules is OperationModel:
        return OperationModel(problem)
    try:
        if isolated:
            refuse_foreign_code(problem)
        return ModuleModel(problem)
    except NoRule:
        if rules is ModuleModel:
            raise
        return OperationModel(problem)
