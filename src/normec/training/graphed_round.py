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
        # An optimizer of the server steps outside of the recording, which then ends at the direction.
        self._direction = torch.zeros_like(x) if plan.server_optimizer is not None else None
        self._known: tuple[int, float] | None = None  # what the two are

    def can_run(self, state: State, block: Block, count: int) -> bool:
        """Whether the graph can run a round of `count` clients."""
        fits = all(held.device == state.x.device and held.dtype == state.x.dtype for held in state.clients.values())
        return self.able and fits and len(block.clients) == count

    def run(self, state: State, block: Block) -> Tensor | None:
        """The round's messages are made, and all is noted that may be broken; the release was paid for.

        Returns:
            The direction, or None where x has moved along it.
        """
        now = state.round, self._plan.step_size(state.round)
        if self._known is None or self._known[0] != now[0]:
            self._round.fill_(now[0])
        if self._known is None or self._known[1] != now[1]:
            self._lr.fill_(now[1])
        moving = [] if isinstance(block.rows, slice) else [block.rows]
        if self._mechanism is not None:
            variance = self._mechanism.variance_of_messages(block.clients, self._plan.weights)
            moving.append(self._mechanism.noise_of_sum(state.x, variance))

        def compute(*inputs: Tensor) -> None:
            rows = block.rows if isinstance(block.rows, slice) else inputs[0]
            self._compute(state, block, rows, inputs[-1] if self._mechanism is not None else None)

        if self._graphs is None:
            compute(*moving)
        else:
            fixed = [state.x, *state.clients.values(), *state.server.values(), block.grads, block.losses]
            self._graphs.run(compute, moving, fixed, str(block.rows) if isinstance(block.rows, slice) else "rows")
        self._known = now[0] + 1, now[1]
        return self._direction

    def _compute(self, state: State, block: Block, rows: Tensor | slice, noise: Tensor | None) -> None:
        block = Block(block.clients, block.grads, block.losses, rows, block.first)
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
