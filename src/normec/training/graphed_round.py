"""The part of a round after the gradients as one CUDA graph: messages, memories and the server's step.

It consists of about fifty small kernels, and launching them takes longer than running them. The graph is used in rounds
without a row of history whose participating clients form one block. All other rounds use `TrainingLoop.step`, which
computes the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..algorithms.method import MEMORY, Steps, recordable
from ..gradients.cuda_graphs import CudaGraphs
from ..gradients.engine import Block
from ..problems.objective import Objective
from ..sampling.participation import Everyone
from . import fused_update
from .client_update import ClientUpdate
from .metrics import Faults
from .run import Plan, State

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism

_COPIED = 2**22  # the most numbers in gradients that are copied to where a graph reads them


class GraphedRound:
    """Runs the graph; the number of the round and the step size, which change, are kept on the device."""

    def __init__(
        self,
        steps: Steps,
        plan: Plan,
        problem: Objective,
        mechanism: Mechanism | None,
        faults: Faults,
        update: ClientUpdate,
        able: bool,
    ) -> None:
        """`able`: all messages are computed in this process, and only their sum is released."""
        self._steps, self._plan, self._n, self._faults, self._update = steps, plan, problem.clients, faults, update
        self._mechanism, x = mechanism, problem.x0
        self._graphs = CudaGraphs("the update") if x.is_cuda else None
        real = mechanism is not None and not mechanism.simulated  # then every round is checked before it is released
        # The forgetting of clients that are not drawn uses factors that the host computes.
        forgetting = update.forgets and not isinstance(plan.participation, Everyone)
        self.suited = able and update.fused and not real and not forgetting and recordable(steps.method)
        self.able = self.suited and x.is_cuda
        self._round, self._lr = torch.zeros((), dtype=torch.int64, device=x.device), x.new_zeros(())
        # An optimizer of the server steps outside of the graph, which then ends at the direction.
        self._direction = torch.zeros_like(x) if plan.server_optimizer is not None else None
        self._known: tuple[int, float] | None = None  # the values of `_round` and `_lr`, without asking the device
        self._at: tuple[int, ...] | None = None  # where the last round's gradients were
        self._moving = False

    def can_run(self, state: State, block: Block, count: int) -> bool:
        """Whether the graph can run a round of `count` clients."""
        if not self.able or len(block.clients) != count:
            return False
        return all(held.device == state.x.device and held.dtype == state.x.dtype for held in state.clients.values())

    def run(self, state: State, block: Block) -> Tensor | None:
        """Make the messages, memories and server's step of a round whose release was paid for; faults are noted.

        Returns:
            The direction, or None where x has moved along it.
        """
        now = state.round, self._plan.step_size(state.round)
        if self._known is None or self._known[0] != now[0]:
            self._round.fill_(now[0])
        if self._known is None or self._known[1] != now[1]:
            self._lr.fill_(now[1])
        moving = {} if isinstance(block.rows, slice) else {"rows": block.rows}
        if self._mechanism is not None:
            variance = self._mechanism.variance_of_messages(block.clients, self._plan.weights)
            moving["noise"] = self._mechanism.noise_of_sum(state.x, variance)
        found = {"grads": block.grads, "losses": block.losses}
        fixed = [state.x, *state.clients.values(), *state.server.values()]
        if self._moves(found):
            moving |= found
        else:
            fixed += found.values()

        def compute(*inputs: Tensor) -> None:
            given = found | dict(zip(moving, inputs, strict=True))
            own = Block(block.clients, given["grads"], given["losses"], given.get("rows", block.rows), block.first)
            self._compute(state, own, given.get("noise"))

        if self._graphs is None:
            compute(*moving.values())
        else:
            name = str(block.rows) if isinstance(block.rows, slice) else "rows"
            self._graphs.run(compute, [*moving.values()], fixed, name)
        self._known = now[0] + 1, now[1]
        return self._direction

    def _moves(self, found: dict[str, Tensor]) -> bool:
        """Whether gradients are copied to where the graph reads them: an engine may put them elsewhere every round.

        Large ones are not, because a copy of them takes longer than the launches that a graph saves.
        """
        at = tuple(one.data_ptr() for one in found.values())
        if self._at is not None and self._at != at and found["grads"].numel() <= _COPIED:
            self._moving = True
        self._at = at
        return self._moving

    def _compute(self, state: State, block: Block, noise: Tensor | None) -> None:
        self._faults.note_losses(block, self._round)
        if self._update.form is None:
            raise TypeError("only a fused form can be captured")
        weights = self._update.weights_of(block)
        # The seed is used only for memories of lower precision.
        sent = fused_update.apply_fused(self._update.form, block, state.clients.get(MEMORY), 0, weights)
        self._faults.note_lengths(block, sent.lengths, self._update.bound, self._round)
        total = sent.total if noise is None else sent.total + noise
        self._faults.note_sum(total, self._round)
        direction, server = self._steps.server_step(total / self._n, state.server)
        if self._direction is None:
            state.x -= self._lr * direction
        else:
            self._direction.copy_(direction)
        for name, new in server.items():
            state.server[name].copy_(new)
        self._round += 1
