"""The reference engine: one client after the other, by plain autograd.

With `record_clip`, the gradient of every record is bounded, as `RecordClip` describes: (1/B) Σ Clip_C(∇ℓ_r(x)), with a
fixed, public B.

The guarantee for a record needs more than the clip: the shares of all other records must have the same bits with and
without it. Kernels add up in an order that depends on the shape of a batch and on a record's position in it, and at an
extreme x another order gives another gradient altogether. So records are computed in blocks of fixed sizes. Empty
positions are filled with copies, and only sizes are used at which a record has the same bits at every position
(`record_blocks`). The order of additions depends on shapes and not on values, therefore made-up records are enough to
find these sizes. The shares are added up in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from ..errors import UsageError
from ..problems.batch_form import Tree, alone, leaves_of, part_of, size_of
from ..problems.client_data import synthetic
from ..problems.functions import FunctionProblem
from ..problems.objective import Buffers, Objective
from ..problems.problem import Problem
from ..sampling.batches import BatchSource
from ..sampling.random_streams import Stream, derive_seed, seed_generators, seed_in_secret
from .engine import Block, BlockEngine
from .own_vmap_rules import RefuseOwnVmapRules
from .precision import Precision, autocast
from .record_clip import RecordClip
from .restored import UserState, forgetful, state_of
from .shared.recurrent import RecurrentByStep

_BLOCK_FLOATS = 2**24  # the most numbers in a block of gradients, 64 MiB in float32

RECORD_BLOCKS = (256, 64, 16)  # sizes of blocks of records, if they can be used
_RECORD_FLOATS = 2**23  # the most numbers in the gradients of such a block
_TRIED_FLOATS = 2**19  # numbers in the gradients of the made-up records that sizes are compared on, at least
_ONE_THREAD_FLOPS = 1e7


class LoopEngine(BlockEngine):
    """Computes client by client anything that autograd can differentiate."""

    name = "loop"

    def __init__(
        self,
        problem: Objective,
        batches: BatchSource | None,
        seed: int,
        record_clip: RecordClip | None = None,
        precision: Precision = "tf32",
        record_blocks: Sequence[int] | None = None,
        secret: bool = False,
        private: bool = False,
    ) -> None:
        """`record_blocks`: sizes of blocks of records (default: those that `record_blocks` finds).

        `secret`: nobody may find out the random numbers of models, which follow from `seed`.

        In a `private` run code of the user's own starts every client as it was before (`restored`).
        """
        if record_clip is not None:
            refuse_coupled_records(problem)
        self._problem, self._batches, self._seed, self._clip = problem, batches, seed, record_clip
        self._record_blocks, self._secret, self._private = record_blocks, secret, private
        self._states: dict[int, UserState] = {}  # of functions by client, and of other kinds of problems under 0
        self.precision: Precision = precision
        self.divisors = problem.sizes.double() if problem.sizes is not None else torch.ones(problem.clients)
        if batches is not None:
            self.divisors = batches.expected
        self._block = max(1, _BLOCK_FLOATS // len(problem.x0))
        self._work = 2 * len(problem.x0) * float(self.divisors.mean())

    def of(self, problem: Objective, precision: Precision = "tf32") -> LoopEngine:
        """Return the same engine for another problem, to compare engines; by default without autocast."""
        batches = self._batches
        if batches is not None and problem.sizes is not None:
            batches = batches.of(problem.sizes)
        blocks = RECORD_BLOCKS[-1:]
        return LoopEngine(problem, batches, self._seed, self._clip, precision, blocks, private=self._private)

    @property
    def threads(self) -> int:
        """One thread for small gradients, which are done before a second thread has woken up."""
        return 1 if self._work < _ONE_THREAD_FLOPS else torch.get_num_threads()

    def blocks(
        self, x: Tensor, buffers: Buffers, round: int, clients: Tensor | None = None, *, full: bool = False
    ) -> Iterator[Block]:
        everyone = torch.arange(self._problem.clients) if clients is None else clients
        for chunk in everyone.split(self._block) if len(everyone) else ():
            rows: list[Tensor | None] = [None] * len(chunk)
            if self._batches is not None and not full:
                rows = list(self._batches.draw(chunk, round))
            grads = x.new_empty(len(chunk), len(x))
            losses = x.new_empty(len(chunk))
            for position, client in enumerate(chunk.tolist()):
                with self._state(client).restored() if self._private else nullcontext():
                    losses[position], grads[position] = self._gradient(x, client, rows[position], buffers, round)
            yield Block.of(chunk, grads, losses)

    def _state(self, client: int) -> UserState:
        problem = self._problem
        if isinstance(problem, Problem):
            return state_of(problem)
        if type(problem) is FunctionProblem:
            if client not in self._states:
                self._states[client] = UserState(problem.functions[client])
            return self._states[client]
        if not self._states:
            self._states[0] = state_of_objective(problem)
        return self._states[0]

    def _gradient(
        self, x: Tensor, client: int, rows: Tensor | None, buffers: Buffers, round: int
    ) -> tuple[Tensor, Tensor]:
        self._seed_generators(client, round, x.device)
        point = x.detach().clone().requires_grad_()  # a model may write to its parameters
        sizes = self._problem.sizes if rows is None else None  # a full gradient is no batch
        divisor = float((self.divisors if sizes is None else sizes)[client])
        uniforms = self._uniforms(client, rows, round, x.device)
        if self._clip is not None and isinstance(self._problem, Problem):
            if self._record_blocks is None:
                self._record_blocks = record_blocks(self._problem)
                self._seed_generators(client, round, x.device)
            blocks = self._record_blocks
            return clipped_gradient(self._problem, x, client, rows, self._clip, divisor, blocks, uniforms=uniforms)
        own = {name: values[client] for name, values in buffers.items()}
        with torch.enable_grad(), autocast(x.device, self.precision):
            poisson = None if rows is None or len(rows) == divisor else divisor
            loss = self._problem.client_loss(point, client, rows, own, uniforms, poisson)
            if not loss.requires_grad:  # the function does not depend on x
                if isinstance(self._problem, Problem):
                    raise UsageError(
                        "the loss does not depend on the model's parameters; look for detach() or no_grad()"
                    )
                return loss.detach(), torch.zeros_like(point)
            (grad,) = torch.autograd.grad(loss, point)
        return loss.detach(), grad

    def _seed_generators(self, client: int, round: int, device: torch.device) -> None:
        """Seed torch's global generators for a client and a round: dropout and random transforms draw from them."""
        if self._secret:
            seed_in_secret(self._seed, device, "model", client, round)
        else:
            seed_generators(derive_seed(self._seed, "model", client, round), device)

    def _uniforms(self, client: int, rows: Tensor | None, round: int, device: torch.device) -> Tensor | None:
        augment, sizes = self._problem.augment, self._problem.sizes
        if augment is None or sizes is None:
            return None
        count = int(sizes[client]) if rows is None else len(rows)
        stream = Stream(self._seed, "augment")
        drawn = stream.uniform(torch.tensor([client], device=device), round, count * augment.draws)
        return drawn.view(count, augment.draws)


def state_of_objective(problem: Objective) -> UserState:
    """Return what the code of an objective of any kind can keep."""
    if isinstance(problem, Problem):
        return state_of(problem)
    if type(problem) is FunctionProblem:
        return UserState(*problem.functions)
    return UserState(attributes_of=problem)


Shares = Callable[[Problem, Tensor, Tree, Tree, RecordClip, int], tuple[Tensor, Tensor]]


def record_shares(
    problem: Problem, x: Tensor, inputs: Tree, targets: Tree, clip: RecordClip, block: int
) -> tuple[Tensor, Tensor]:
    """Return the bounded gradient ``[B, d]`` and the loss ``[B]`` of every record, computed in one block."""
    # Indexing also copies the records to the start of a new piece of memory; kernels may depend on the alignment.
    count = size_of(inputs)
    positions = torch.arange(block, device=leaves_of(inputs)[0].device).clamp_max(count - 1)
    with state_of(problem).restored():
        grads, values = record_gradients(problem, x, part_of(inputs, positions), part_of(targets, positions))
    return clip(grads, problem.tensor_sizes)[:count], values[:count]


def clipped_gradient(
    problem: Problem,
    x: Tensor,
    client: int,
    rows: Tensor | None,
    clip: RecordClip,
    divisor: float,
    blocks: Sequence[int],
    shares: Shares = record_shares,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient) of a client on its records `rows` (None: all), in float64.

    `shares` computes the gradients of the records and bounds them by `clip`, in blocks of the sizes `blocks`; their sum
    is divided by `divisor`. The penalty depends on no record, so its gradient is added unclipped. The loss is for the
    history; no guarantee covers it.

    `uniforms` ``[B, draws]`` are for the augmentation, which sees one record at a time.
    """
    refuse_coupled_records(problem)
    some = rows is None or len(rows) > 0
    inputs, targets = problem.records.batch(client, rows) if some else (x.new_empty(0), x.new_empty(0))
    if some and isinstance(inputs, Tensor):  # an augmentation is for inputs in one tensor
        inputs = forgetful(problem).augmented_by_record(inputs, uniforms)
    total, losses = torch.zeros_like(x, dtype=torch.float64), x.new_zeros((), dtype=torch.float64)
    for start, size in _cover(size_of(inputs), blocks):
        part = slice(start, start + size)
        bounded, values = shares(problem, x, part_of(inputs, part), part_of(targets, part), clip, size)
        total += bounded.sum(0, dtype=torch.float64)
        losses += values.sum(dtype=torch.float64)
    grad, loss = total / divisor, losses / divisor
    base, slope = problem.penalised(x)
    return loss + base, grad if slope is None else grad + slope


def refuse_coupled_records(problem: Objective) -> None:
    """Refuse to bound single records where code of the user sees them together: one may change the others."""
    if type(problem) is not Problem:
        raise UsageError(
            f"record_clip needs the records of a Problem one by one, and {type(problem).__name__} has code of its own "
            "that may leave them as they are or let one change the others; use Problem itself, or leave record_clip out"
        )
    if problem.form.collate is not None:
        raise UsageError(
            "record_clip needs the records one by one, and a collate function sees them together: one may change the "
            "others; put the records into one shape in the data set, and leave collate out"
        )


def _cover(records: int, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the starts and sizes of blocks for this many records; only the last block may have empty positions."""
    start = 0
    while start < records:
        size = next((size for size in blocks if size <= records - start), blocks[-1])
        yield start, size
        start += size


def record_gradients(
    problem: Problem, x: Tensor, inputs: Tree, targets: Tree, randomness: str = "different"
) -> tuple[Tensor, Tensor]:
    """Return per-record gradients ``[B, d]`` and losses ``[B]``; model and transform see one record at a time."""
    problem.model.train()

    def one(point: Tensor, item: Tree, target: Tree) -> Tensor:
        return problem.value(point, alone(item), alone(target)).loss

    each = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness=randomness)
    with RefuseOwnVmapRules(UsageError), RecurrentByStep(problem.model):
        try:
            grads, values = each(x, inputs, targets)
        except RuntimeError as error:
            if "atching rule" not in str(error) and "vmap" not in str(error):
                raise
            raise UsageError(
                "the model, the loss or the transform uses an operation that torch.func.vmap cannot apply to one "
                f"record at a time ({str(error).splitlines()[0]}); use another operation, which returns a new tensor "
                "instead of writing to out=, or leave record_clip out"
            ) from error
    return grads, values


def record_blocks(problem: Problem) -> tuple[int, ...]:
    """Return sizes of blocks, the largest first, in all of which a record has the same bits at every position.

    The sizes are found with made-up records near the initial parameters, so they say nothing about the data. If no
    size of `RECORD_BLOCKS` is suitable, records are computed one by one.
    """
    fitting = [size for size in RECORD_BLOCKS if size * len(problem.x0) <= _RECORD_FLOATS]
    if not fitting:
        return (1,)
    count = min(fitting[0], max(fitting[-1], _TRIED_FLOATS // len(problem.x0)))
    draw = torch.Generator().manual_seed(0)
    first = problem.records.batch(0, torch.zeros(1, dtype=torch.int64))
    inputs, targets = tree_map(lambda part: synthetic(part, count, draw), first)
    x = problem.x0
    x = x + (1e-3 + 0.1 * x.square().mean().sqrt()) * torch.randn(len(x), dtype=x.dtype, generator=draw).to(x.device)

    def found(size: int, shift: int) -> Tensor:
        """Return the records' gradients, computed in blocks of one size, `shift` positions from the usual ones."""
        order, grads = torch.arange(count).roll(shift), []
        for part in order.split(size):
            positions = part[torch.arange(size) % len(part)].to(x.device)
            seed_generators(0, x.device)  # the masks of dropout are the same at every position and in every block
            with state_of(problem).restored():
                several, _ = record_gradients(
                    problem, x, part_of(inputs, positions), part_of(targets, positions), "same"
                )
            grads.append(several[: len(part)])
        return torch.cat(grads)[order.argsort().to(x.device)]

    try:
        usual = found(fitting[-1], 0)
        if not _same(usual, found(fitting[-1], 3)):
            return (1,)
        return (*(size for size in fitting[:-1] if _same(usual, found(size, 5))), fitting[-1])
    except Exception:  # the model does not take made-up records
        return (1,)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
