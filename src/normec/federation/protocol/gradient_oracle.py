"""The gradient of a party's own data at x, computed as the one-process engine computes it for client i.

Where the plan has local steps, it is the update that they lead to.

A party holds one client's records and knows its number i among the parties. All random choices (batches, augmentation,
dropout, a random operator) come from streams keyed by (seed, client, round), so a party that is asked as client i
draws what client i of `normec.train` draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import UsageError
from ...gradients.engine import Engine
from ...gradients.local_steps import LocalEngine, OneByOne
from ...gradients.loop import LoopEngine
from ...problems.objective import Buffers
from ...problems.problem import Problem
from ...sampling.batches import Batches
from .terms import PlanTerms

_TRIED = 32  # records of the trial gradient


class GradientOracle(Protocol):
    """∇f_i(x), or the update by the plan's local steps, and f_i(x), on the records of a round.

    Any behaviour of `gradient` that the server can observe may reveal something about the data. Therefore a private
    message is paid for before `gradient` is called, and if it fails or is not finite, only noise is sent.
    """

    def check(self, x: Tensor) -> None:
        """Raise if no gradient can be computed for a model of this size. The values in x must not matter."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]: ...


class ProblemOracle(GradientOracle):
    """The gradients of a `Problem` with one client, the party itself.

    The constructor computes one gradient at the model's initial parameters. So code that cannot work fails before
    anything is paid for, with an error that no server can influence.
    """

    def __init__(self, problem: Problem) -> None:
        if problem.clients != 1:
            raise UsageError(f"a party works on its own data, one client; the problem has {problem.clients}")
        if problem.statistics:
            raise UsageError(
                "the running statistics of BatchNorm would stay at the parties; use GroupNorm in a federation"
            )
        self._problem = problem
        grad, _ = self.gradient(problem.x0, 0, 0, PlanTerms(seed=0, batch_size=_TRIED, rounds=1))
        if not bool(torch.isfinite(grad).all()):
            raise UsageError(
                "the gradient at the model's initial parameters is not finite; check the data and the loss"
            )

    def check(self, x: Tensor) -> None:
        if len(x) != len(self._problem.x0):
            raise UsageError(f"the model here has {len(self._problem.x0)} parameters, x has {len(x)}")

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:
        self.check(x)
        problem = self._problem
        if problem.x0.dtype != x.dtype:
            problem = problem.to(x.device, x.dtype)
        objective = _PartyObjective(problem, index)
        batches = _OwnBatches(objective.sizes, plan.batch_size, plan.seed) if plan.batch_size else None
        buffers = objective.initial_buffers()
        before = {name: rows[index].clone() for name, rows in buffers.items()}
        engine: Engine
        loop = engine = LoopEngine(objective, batches, plan.seed)  # type: ignore[arg-type]  # it has all that the loop uses
        if plan.local is not None:
            local = plan.local.build()
            engine = LocalEngine(OneByOne(loop, len(x)), local, local.counts(objective.clients, None))
        with torch.random.fork_rng(devices=[]):
            (block,) = engine.blocks(x, buffers, round, torch.tensor([index]))
        for name, row in before.items():
            if not torch.equal(row, buffers[name][index]):
                raise UsageError(f"the buffer {name} depends on the data and is not sent to the server; remove it")
        return block.grads[0].clone(), float(block.losses[0])


@dataclass
class _PartyObjective:
    """The objective of a federation as one party sees it: it answers for client `index` and for no other."""

    problem: Problem
    index: int

    def __post_init__(self) -> None:
        own = self.problem.records.sizes
        self.x0, self.clients, self.augment = self.problem.x0, self.index + 1, self.problem.augment
        self.sizes = own.expand(self.clients)  # only the last is ever used

    def client_loss(self, x: Tensor, client: int, *rest: Any) -> Tensor:  # noqa: ARG002
        return self.problem.client_loss(x, 0, *rest)

    def initial_buffers(self) -> Buffers:
        found = self.problem.initial_buffers()
        return {name: rows.expand(self.clients, *rows.shape[1:]) for name, rows in found.items()}  # one row in memory


class _OwnBatches:
    """`Batches` for one client, without the table of the record orders of all clients."""

    def __init__(self, sizes: Tensor, batch_size: int, seed: int) -> None:
        self._of_all = Batches(sizes, batch_size, seed)

    @property
    def expected(self) -> Tensor:
        return self._of_all.expected

    def draw(self, clients: Tensor, round: int | Tensor) -> list[Tensor]:
        table, lengths = self.padded(clients, round)
        return [row[:length] for row, length in zip(table, lengths.tolist(), strict=True)]

    def padded(self, clients: Tensor, round: int | Tensor) -> tuple[Tensor, Tensor]:
        batches = self._of_all
        return batches.tables(clients, torch.as_tensor(round)[None])[0], batches.sizes[clients].clamp(
            max=batches.batch_size
        )
