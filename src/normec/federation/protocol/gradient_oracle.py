"""The gradient of a party's own data at x, computed as the one-process engine computes it for client i.

Where the plan has local steps, it is the update that they lead to. Where it bounds the gradient of every record
(`RecordTerms`), it is (1/B) Σ clip(∇ℓ_r(x)) with the public B of the terms. Then one record must not move the result by
more than C/B, whatever x is. So a record whose gradient is not finite, or whose computation fails, adds zero; if it
made the whole message zero instead, a server could choose x such that a single record decides about the message. And
all other records keep their bits, whichever records stand beside them (`gradients/loop.py`).

A party holds one client's records and knows its number i among the parties. All random choices (batches, augmentation,
dropout, a random operator) come from streams keyed by (seed, client, round), so a party that is asked as client i
draws what client i of `normec.train` draws. The exception are gradients that are clipped record by record: their
Poisson batches, augmentations and dropout masks must be secret, so the party draws them from the operating system's
generator, unless the noise is seeded too.

A party computes many messages with one model and one loss. What such code keeps while it computes a gradient is undone
afterwards (`gradients.restored`), also for the trial when the data are loaded and in runs without noise, and so are
changes of frozen parameters. Otherwise it could take what it saw of some records to messages in which each record is
clipped.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...algorithms.operators import norms
from ...data.augment import treats_records_alone
from ...errors import UsageError
from ...gradients.engine import Engine
from ...gradients.local_steps import LocalEngine, OneByOne
from ...gradients.loop import LoopEngine, clipped_gradient, record_blocks, record_shares, refuse_coupled_records
from ...gradients.record_clip import RecordClip
from ...gradients.restored import UserState, state_of
from ...problems.batch_form import Tree, part_of, size_of
from ...problems.objective import Buffers
from ...problems.problem import Problem
from ...sampling.batches import Batches, PoissonBatches
from ...sampling.random_streams import coins_below, derive_seed, seed_generators, seed_in_secret
from ...training.independence import refuse_coupled_clients
from ...training.metrics import ROUNDING
from .terms import PlanTerms, RecordTerms

_TRIED = 32  # records of the trial gradient


class GradientOracle(Protocol):
    """∇f_i(x), or the update by the plan's local steps, and f_i(x), on the records of a round.

    Any behaviour of `gradient` that the server can observe may reveal something about the data. Therefore a private
    message is paid for before `gradient` is called, and if it fails or is not finite, only noise is sent.
    """

    def check(self, x: Tensor) -> None:
        """Raise if no gradient can be computed for a model of this size. The values in x must not matter."""

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]: ...

    def corrected_update(
        self,
        x: Tensor,  # noqa: ARG002
        index: int,  # noqa: ARG002
        round: int,  # noqa: ARG002
        plan: PlanTerms,  # noqa: ARG002
        correction: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, float]:
        """The same with `correction` added to the gradient of every local step."""
        raise UsageError(f"{type(self).__name__} cannot correct the gradients of local steps; define corrected_update")

    def check_records(self) -> None:
        """Raise if `clipped_gradient` cannot bound what one record adds, for any x and any terms."""
        raise UsageError(f"{type(self).__name__} cannot clip records; define check_records and clipped_gradient")

    def clipped_gradient(
        self,
        x: Tensor,  # noqa: ARG002
        index: int,  # noqa: ARG002
        round: int,  # noqa: ARG002
        plan: PlanTerms,  # noqa: ARG002
        terms: RecordTerms,  # noqa: ARG002
        *,
        secret_coins: bool,  # noqa: ARG002
    ) -> tuple[Tensor, float]:
        """(1/B) Σ clip(∇ℓ_r(x)) with the clip, the B and the batches of `terms`, and f_i(x).

        If not `secret_coins`, batches follow from the plan's seed, as in a simulation.
        """
        raise UsageError(f"{type(self).__name__} cannot clip records; define check_records and clipped_gradient")


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
        self._problem, self._records_checked = problem, False
        self._blocks: dict[torch.dtype, tuple[int, ...]] = {}  # sizes of blocks of records, by the precision of x
        grad, _ = self.gradient(problem.x0, 0, 0, PlanTerms(seed=0, batch_size=_TRIED, rounds=1))
        if not bool(torch.isfinite(grad).all()):
            raise UsageError(
                "the gradient at the model's initial parameters is not finite; check the data and the loss"
            )

    def check(self, x: Tensor) -> None:
        if len(x) != len(self._problem.x0):
            raise UsageError(f"the model here has {len(self._problem.x0)} parameters, x has {len(x)}")

    def check_records(self) -> None:
        """Raise if records are not independent of each other, as far as this can be checked, or cannot be clipped."""
        if self._records_checked:
            return
        problem = self._problem
        refuse_coupled_records(problem)
        if not treats_records_alone(problem.augment):
            # Code of the user that fails for one record would take the whole message with it.
            raise UsageError("record_clip at a party goes with the augmentations of normec.data; use one, or none")
        if problem.penalty is not None:
            # At an x that the server chooses, the slope of the penalty may be so large that the sum of the records is
            # rounded to a multiple of it: one record would then move the message by far more than its share.
            raise UsageError("record_clip does not go with a penalty at the party; let the server's problem have it")
        if problem.repeated:
            raise UsageError(
                "a record occurs more than once in the party's data, and unit='record' accounts for one occurrence; "
                "keep every record once"
            )
        problem.records.batch(0, None)  # a record that cannot be read would fail every message that it is part of
        refuse_coupled_clients(problem, 0, RecordClip("auto"))
        self._records_checked = True

    def clipped_gradient(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, terms: RecordTerms, *, secret_coins: bool
    ) -> tuple[Tensor, float]:
        self.check_records()
        problem = self._like(x)
        rows = None
        if terms.batch_rate is not None and secret_coins:
            rows = _secret_batch(int(problem.records.sizes[0]), terms.batch_rate)
        elif terms.batch_rate is not None:
            sizes = problem.records.sizes.expand(index + 1)
            (rows,) = PoissonBatches(sizes, terms.batch_rate, plan.seed).draw(torch.tensor([index]), round)
        with torch.random.fork_rng(devices=[]):
            if x.dtype not in self._blocks:
                self._blocks[x.dtype] = record_blocks(problem)
            if secret_coins:
                # The dropout mask of a record depends on its position, and so on which records stand before it. With
                # masks that the server knows or can try out, leaving out one record would show in all later ones.
                seed_in_secret(secrets.randbits(128), x.device)
            else:
                seed_generators(derive_seed(plan.seed, "model", index, round), x.device)
            uniforms = None
            if problem.augment is not None:
                count = int(problem.records.sizes[0]) if rows is None else len(rows)
                uniforms = torch.rand(count, problem.augment.draws)
            clip, blocks = terms.build(), self._blocks[x.dtype]
            try:
                loss, grad = clipped_gradient(
                    problem, x, 0, rows, clip, terms.divisor, blocks, _contained_shares, uniforms
                )
            finally:
                problem.undo_moved_constants()
        return grad, float(loss)

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:
        return self._update(x, index, round, plan, None)

    def corrected_update(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, correction: Tensor
    ) -> tuple[Tensor, float]:
        return self._update(x, index, round, plan, correction)

    def _like(self, x: Tensor) -> Problem:
        """The problem in the precision of x."""
        self.check(x)
        same = self._problem.x0.dtype == x.dtype
        return self._problem if same else self._problem.to(x.device, x.dtype)

    def _update(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, correction: Tensor | None
    ) -> tuple[Tensor, float]:
        problem = self._like(x)
        objective = _PartyObjective(problem, index)
        batches = _OwnBatches(objective.sizes, plan.batch_size, plan.seed) if plan.batch_size else None
        buffers = objective.initial_buffers()
        before = {name: rows[index].clone() for name, rows in buffers.items()}
        engine: Engine
        loop = engine = _PartyLoop(objective, batches, plan.seed, private=True)  # type: ignore[arg-type]  # it has all that the loop uses
        more: dict[str, Any] = {}
        if plan.local is not None:
            local = plan.local.build()
            engine = LocalEngine(OneByOne(loop, len(x)), local, local.counts(objective.clients, None))
            more = {"correction": lambda _: correction[None]} if correction is not None else {}
        try:
            with torch.random.fork_rng(devices=[]):
                (block,) = engine.blocks(x, buffers, round, torch.tensor([index]), **more)
        finally:
            moved = problem.undo_moved_constants()
        found = [f"buffer {name}" for name, row in before.items() if not torch.equal(row, buffers[name][index])]
        for what in (*found, *(f"frozen parameter {name}" for name in moved)):
            raise UsageError(f"the {what} depends on the data and is not sent to the server; remove it")
        return block.grads[0].clone(), float(block.losses[0])


def _contained_shares(
    problem: Problem, x: Tensor, inputs: Tree, targets: Tree, clip: RecordClip, block: int
) -> tuple[Tensor, Tensor]:
    """`record_shares`, in which a record that fails, or whose share is not within the bound, adds zero."""
    try:
        shares, losses = record_shares(problem, x, inputs, targets, clip, block)
    except Exception:  # some record makes the party's code fail; the others are computed without it, in equal blocks
        count = size_of(inputs)
        if count == 1:
            return x.new_zeros(1, len(x)), x.new_zeros(1)
        halves = [
            (part_of(inputs, half), part_of(targets, half)) for half in (slice(count // 2), slice(count // 2, None))
        ]
        found = [_contained_shares(problem, x, *half, clip, block) for half in halves]
        shares, losses = (torch.cat(parts) for parts in zip(*found, strict=True))
    within = norms(shares) <= clip.bound * (1 + ROUNDING)  # False for what is not a number
    return torch.where(within, shares, torch.zeros_like(shares)), losses


def _secret_batch(records: int, rate: float) -> Tensor:
    """The records of a Poisson batch, drawn with coins that nobody else can know."""
    words = np.frombuffer(secrets.token_bytes(8 * records), np.uint64)
    coins = words >> np.uint64(11) < np.uint64(coins_below(rate))
    return torch.from_numpy(coins.nonzero()[0])


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


class _PartyLoop(LoopEngine):
    """The loop for a party, whose code starts every gradient as it was when the data were loaded."""

    def _state(self, client: int) -> UserState:  # noqa: ARG002
        objective = cast(_PartyObjective, self._problem)
        return state_of(objective.problem)


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
        table = batches.tables(clients, torch.as_tensor(round)[None])[0]
        return table, batches.sizes[clients].clamp(max=batches.batch_size)
