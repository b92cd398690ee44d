"""The reference engine: one client after the other, by plain autograd.

With `record_clip`, the gradient of every record is bounded, as `RecordClip` describes: (1/B) Σ Clip_C(∇ℓ_r(x)), with a
fixed, public B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..errors import UsageError
from ..problems.batch_form import Tree, alone, part_of, size_of
from ..problems.objective import Buffers, Objective
from ..problems.problem import Problem
from ..sampling.batches import BatchSource
from ..sampling.random_streams import Stream, derive_seed, seed_generators
from .engine import Block
from .precision import Precision, autocast
from .record_clip import RecordClip

_BLOCK_FLOATS = 2**24  # the most numbers in a block of gradients, 64 MiB in float32

_CHUNK_FLOATS = 2**24  # the most numbers in per-record gradients that are held at once
_ONE_THREAD_FLOPS = 1e7


class LoopEngine:
    """Computes client by client anything that autograd can differentiate."""

    name = "loop"

    def __init__(
        self,
        problem: Objective,
        batches: BatchSource | None,
        seed: int,
        record_clip: RecordClip | None = None,
        precision: Precision = "tf32",
    ) -> None:
        self._problem, self._batches, self._seed, self._clip = problem, batches, seed, record_clip
        self.precision: Precision = precision
        self.divisors = problem.sizes.double() if problem.sizes is not None else torch.ones(problem.clients)
        if batches is not None:
            self.divisors = batches.expected
        self._block = max(1, _BLOCK_FLOATS // len(problem.x0))
        self._work = 2 * len(problem.x0) * float(self.divisors.mean())

    def of(self, problem: Objective, precision: Precision = "tf32") -> LoopEngine:
        """Return the same engine for another problem; by default without autocast."""
        return LoopEngine(problem, self._batches, self._seed, self._clip, precision)

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        return f"{self.name}, blocks of {self._block}"

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
                losses[position], grads[position] = self._gradient(x, client, rows[position], buffers, round)
            yield Block.of(chunk, grads, losses)

    def _gradient(
        self, x: Tensor, client: int, rows: Tensor | None, buffers: Buffers, round: int
    ) -> tuple[Tensor, Tensor]:
        # Dropout and random transforms draw from torch's global generators, so seed them for this client and round.
        seed_generators(derive_seed(self._seed, "model", client, round), x.device)
        point = x.detach().clone().requires_grad_()  # a model may write to its parameters
        divisor = float(self.divisors[client])
        if self._clip is not None and isinstance(self._problem, Problem):
            return clipped_gradient(self._problem, x, client, rows, self._clip, divisor)
        own = {name: values[client] for name, values in buffers.items()}
        uniforms = self._uniforms(client, rows, round, x.device)
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

    def _uniforms(self, client: int, rows: Tensor | None, round: int, device: torch.device) -> Tensor | None:
        augment, sizes = self._problem.augment, self._problem.sizes
        if augment is None or sizes is None:
            return None
        count = int(sizes[client]) if rows is None else len(rows)
        stream = Stream(self._seed, "augment")
        drawn = stream.uniform(torch.tensor([client], device=device), round, count * augment.draws)
        return drawn.view(count, augment.draws)


def record_shares(problem: Problem, x: Tensor, inputs: Tree, targets: Tree, clip: RecordClip) -> tuple[Tensor, Tensor]:
    """Return the bounded gradient ``[B, d]`` and the loss ``[B]`` of every record."""
    grads, values = record_gradients(problem, x, inputs, targets)
    return clip(grads, problem.tensor_sizes), values


def clipped_gradient(
    problem: Problem,
    x: Tensor,
    client: int,
    rows: Tensor | None,
    clip: RecordClip,
    divisor: float,
    shares: Callable[[Problem, Tensor, Tree, Tree, RecordClip], tuple[Tensor, Tensor]] = record_shares,
) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient) of a client on its records `rows` (None: all).

    The gradient of each record is bounded by `clip`, as `shares` does it; their sum is divided by `divisor`. The
    penalty depends on no record, so its gradient is added unclipped. The loss is for the history; no guarantee covers
    it.
    """
    some = rows is None or len(rows) > 0
    inputs, targets = problem.records.batch(client, rows) if some else (x.new_empty(0), x.new_empty(0))
    total, losses = torch.zeros_like(x), x.new_zeros(())
    for start in range(0, size_of(inputs), size := max(1, _CHUNK_FLOATS // len(x))):
        part = slice(start, start + size)
        bounded, values = shares(problem, x, part_of(inputs, part), part_of(targets, part), clip)
        total += bounded.sum(0)
        losses += values.sum()
    total /= divisor
    loss = losses / divisor
    base, slope = problem.penalised(x)
    return loss + base, total if slope is None else total + slope


def record_gradients(problem: Problem, x: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
    """Return per-record gradients ``[B, d]`` and losses ``[B]``; model and transform see one record at a time."""
    problem.model.train()

    def one(point: Tensor, item: Tree, target: Tree) -> Tensor:
        return problem.value(point, alone(item), alone(target)).loss

    each = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
    grads, values = each(x, inputs, targets)
    return grads, values
