"""How x moves along the direction of a round: by the plain step or by the server's optimizer; and its average."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..algorithms.method import Method, Steps, Tables, noise_response, unknown_noise
from ..algorithms.server_optimizer import OptimizerSteps, ServerOptimizer
from ..errors import UsageError
from .run import AVERAGE, Plan, State

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism

NOISE = "noise_variance"  # the name of the variance of the noise in the direction among the optimizer's tensors


class NoiseVariance:
    """The variance of the noise in a coordinate of the direction, from round to round.

    Noise of variance ν² in the mean message makes it s² ← κ² s² + β² ν², where the method's server lets noise through
    as e ← κ e + β z (`Method.noise_response`). Without privacy it is 0.

    Raises:
        UsageError: The method does not state how noise reaches its direction, or memories take the noise and later
            messages take part of it back, so that the variance is not known.
    """

    def __init__(self, method: Method, dimension: int, clients: int, mechanism: Mechanism | None) -> None:
        self._mechanism, self._clients = mechanism, clients
        self._keep = self._gain = 0.0
        if mechanism is None:
            return
        response = noise_response(method, dimension)
        if response is None:
            raise UsageError(
                f"adambc subtracts the variance of the noise in the direction, which is not known for {method.name}: "
                f"{unknown_noise(method, 'adam')}"
            )
        if mechanism.keeps_noise and Steps(method, torch.zeros(dimension)).stateful:
            raise UsageError(
                "adambc subtracts the variance of the noise in the direction, which is not known with memory='noisy': "
                "later messages take part of the noise back; use memory='clean' or adam"
            )
        if mechanism.banded is not None:
            raise UsageError(
                "adambc subtracts the variance of independent noise in the direction, and noise_bands correlates the "
                "noise of several rounds; use adam, or leave out noise_bands"
            )
        self._keep, self._gain = response

    def after(self, before: float, of_messages: float) -> float:
        """Return the variance in a round, from that of the round before.

        `of_messages`: in units of σ², the variance of the noise in the sum of the round's messages if each has its own
        (`Mechanism.variance_of_messages`).
        """
        if self._mechanism is None:
            return 0.0
        mean = self._mechanism.variance_of_sum(of_messages) / self._clients**2
        return self._keep**2 * before + self._gain**2 * mean


class OptimizerStep:
    """The step of a server optimizer, with the variance of the noise in the direction where it asks for it.

    Args:
        declared: The optimizer.
        method: The method that the direction comes from.
        x: The first model.
        clients: The number of all clients.
        mechanism: The noise of the run; None for a run without privacy.
    """

    def __init__(
        self, declared: ServerOptimizer, method: Method, x: Tensor, clients: int, mechanism: Mechanism | None
    ) -> None:
        self._steps = OptimizerSteps(declared, x)
        self._noise = NoiseVariance(method, len(x), clients, mechanism) if declared.needs_noise_variance else None

    def initial_tables(self) -> Tables:
        """Return the state before the first step."""
        noise = {NOISE: torch.zeros((), dtype=torch.float64)} if self._noise is not None else {}
        return {**self._steps.initial_tables(), **noise}

    def take_noise(self, tables: Tables, of_messages: float) -> float:
        """Note the noise of a round, as `NoiseVariance.after` takes it; returns its variance in the direction."""
        if self._noise is None:
            return 0.0
        variance = self._noise.after(float(tables[NOISE]), of_messages)
        tables[NOISE].fill_(variance)
        return variance

    def step(self, x: Tensor, direction: Tensor, tables: Tables, lr: float, of_messages: float) -> Tables:
        """Move x along the direction, in place, and return the new state; `of_messages` as in `take_noise`."""
        variance = self.take_noise(tables, of_messages)
        noise = {NOISE: tables[NOISE]} if self._noise is not None else {}
        return {**self._steps.step(x, direction, tables, lr, variance), **noise}


class ModelStep:
    """The last part of a round: x moves along the direction, and the average of the iterates follows.

    In warm-up rounds x does not move, and the optimizer makes no step.
    """

    def __init__(self, method: Method, plan: Plan, x: Tensor, clients: int, mechanism: Mechanism | None) -> None:
        self._plan, self._mechanism, declared = plan, mechanism, plan.server_optimizer
        self._optimizer = OptimizerStep(declared, method, x, clients, mechanism) if declared is not None else None

    def begin(self, state: State) -> None:
        """Add to a new state what the optimizer and the average start from."""
        if self._optimizer is not None:
            state.optimizer |= self._optimizer.initial_tables()
        self._average(state, state.round)

    def move(self, state: State, direction: Tensor | None, drawn: Tensor | None) -> None:
        """Make the step of the state's round with the `drawn` clients (None: all).

        Without a direction x has moved already.
        """
        if direction is not None and self._optimizer is not None:
            self._optimize(self._optimizer, state, direction, drawn)
        elif direction is not None:
            state.x -= self._plan.step_size(state.round) * direction
        self._average(state, state.round + 1)

    def _optimize(self, optimizer: OptimizerStep, state: State, direction: Tensor, drawn: Tensor | None) -> None:
        noise = self._mechanism
        variance = noise.variance_of_messages(drawn, self._plan.weights) if noise is not None else 0.0
        if state.round < self._plan.warmup:
            optimizer.take_noise(state.optimizer, variance)
            return
        average = {AVERAGE: state.optimizer[AVERAGE]} if AVERAGE in state.optimizer else {}
        lr = self._plan.step_size(state.round)
        state.optimizer = {**optimizer.step(state.x, direction, state.optimizer, lr, variance), **average}

    def _average(self, state: State, k: int) -> None:
        """Take x^k into the average."""
        weight = self._plan.averaging.weight(k) if self._plan.averaging is not None else 0.0
        if not weight:
            return
        if AVERAGE in state.optimizer:
            state.optimizer[AVERAGE].lerp_(state.x, weight)
        else:
            state.optimizer[AVERAGE] = state.x.clone()
