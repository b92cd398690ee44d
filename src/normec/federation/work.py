"""What a party computes: the gradient of its own data at x, as the one-process engine computes it for client i.

A party holds one client's records and knows its number i among the parties. All random choices (batches, augmentation,
dropout, a random operator) come from streams keyed by (seed, client, round), so a party that is asked as client i
draws what client i of `normec.train` draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UsageError
from ..gradients.loop import Loop
from ..objective import Buffers
from ..problem import Problem
from ..sampling import Batches
from .terms import PlanTerms


class Work(Protocol):
    """∇f_i(x) and f_i(x) on the records of a round."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]: ...


class ProblemWork:
    """A `Problem` of one client: the party's own."""

    def __init__(self, problem: Problem) -> None:
        if problem.clients != 1:
            raise UsageError(f"a party works on its own data, one client; the problem has {problem.clients}")
        if problem.statistics:
            raise UsageError("BatchNorm's statistics would stay behind at the parties; use GroupNorm in a federation")
        self._problem = problem

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:
        problem = self._problem
        if problem.x0.dtype != x.dtype:
            problem = problem.to(x.device, x.dtype)
        if len(x) != len(problem.x0):
            raise UsageError(f"the model here has {len(problem.x0)} parameters, x has {len(x)}")
        seat = _Seat(problem, index)
        batches = _OwnBatches(seat.sizes, plan.batch_size, plan.seed) if plan.batch_size else None
        buffers = seat.initial_buffers()
        before = {name: rows.clone() for name, rows in buffers.items()}
        loop = Loop(seat, batches, plan.seed)  # type: ignore[arg-type]  # a seat is as much of an objective as a loop asks
        with torch.random.fork_rng(devices=[]):
            (block,) = loop.blocks(x, buffers, round, torch.tensor([index]))
        for name, rows in before.items():
            if not torch.equal(rows, buffers[name]):
                raise UsageError(f"the buffer {name} changes with the data and does not travel; remove it")
        return block.grads[0].clone(), float(block.losses[0])


@dataclass
class _Seat:
    """One client in its seat among the others: it answers to its number, nobody else is there."""

    problem: Problem
    index: int

    def __post_init__(self) -> None:
        own = self.problem.records.sizes
        self.x0, self.clients, self.augment = self.problem.x0, self.index + 1, self.problem.augment
        self.sizes = own.expand(self.clients)  # only the last is ever asked for

    def client_loss(self, x: Tensor, client: int, *rest: Any) -> Tensor:  # noqa: ARG002
        return self.problem.client_loss(x, 0, *rest)

    def initial_buffers(self) -> Buffers:
        found = self.problem.initial_buffers()
        return {name: rows.expand(self.clients, *rows.shape[1:]).clone() for name, rows in found.items()}


class _OwnBatches:
    """`Batches` of one client without the table of all clients' orders."""

    def __init__(self, sizes: Tensor, batch_size: int, seed: int) -> None:
        self._of_all = Batches(sizes, batch_size, seed)

    @property
    def expected(self) -> Tensor:
        return self._of_all.expected

    def draw(self, clients: Tensor, round: int) -> list[Tensor]:
        table, lengths = self.padded(clients, round)
        return [row[:length] for row, length in zip(table, lengths.tolist(), strict=True)]

    def padded(self, clients: Tensor, round: int) -> tuple[Tensor, Tensor]:
        batches = self._of_all
        return batches.tables(clients, torch.tensor([round]))[0], batches.sizes[clients].clamp(max=batches.batch_size)
