"""What a run is: the plan it follows, the state that a round changes, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..algorithms.method import ESTIMATE, MEMORY, Method, Tables
from ..errors import UsageError
from ..gradients.precision import Precision
from ..gradients.record_clip import RecordClip
from ..problems.client_data import checksum
from ..problems.objective import Buffers, Objective
from ..sampling.batches import Batches, BatchSource, PoissonBatches
from ..sampling.participation import Participation, drawn_clients
from ..storage.history import History
from .memory_table import MemoryTable

if TYPE_CHECKING:
    from ..privacy.mechanism import Spent
    from ..privacy.statement import Privacy

LOGGING_SETTINGS = (
    "log_every",
    "evaluate_every",
    "full_gradient",
)  # of a plan: what is looked at, not what is computed
ClientTable = dict[str, list[Any]]  # columns of equal length, one entry a client
Schedule = Callable[[int], float]
InitialMemory = Literal["zero", "gradient"] | Tensor


@dataclass
class State:
    """All that a round changes: the model, the clients' and the server's named states, buffers, counts.

    A client's states are rows of tables ``[n, …]``; on a rank the tables hold its own clients' rows.
    """

    round: int
    x: Tensor
    clients: Tables
    server: Tables
    buffers: Buffers
    messages: int = 0

    @property
    def memory(self) -> Tensor:
        """The clients' memories g_i, ``[n, d]``, of a method that has them."""
        return self.clients[MEMORY]

    @property
    def estimate(self) -> Tensor:
        """The server's estimate ĝ, ``[d]``, of a method that has one. With error feedback, ĝ = Σ w_i g_i."""
        return self.server[ESTIMATE]


@dataclass
class Run:
    """The result of `train`.

    `x` is the final model as a vector, and `finished` says whether all rounds were done.

    Args:
        method: The method that was run.
        state: The state at the end: the model, the clients' and the server's states.
        model: The final model as a module; None for a problem of plain functions.
        history: The rows that were recorded.
        timings: The seconds that each part of the rounds took.
        engine: The name of the engine that computed the gradients.
        rounds: The number of rounds that were planned.
        n: The number of clients.
        privacy: What was spent; None for a run without privacy.
        stopped: Why the run ended early, if it did: "interrupted", or what the ledger said.
        clients: Each client at the end, by column; empty in a private run without diagnostics.

    Example:
        >>> import torch
        >>> from normec import GD, Problem, train
        >>> problem = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
        >>> run = train(problem, GD(), lr=0.25, rounds=2)
        >>> run.x, run.finished, run.history["loss"]
        (tensor([0.2500, 0.2500]), True, [2.0, 0.5, 0.125])
    """

    method: Method
    state: State
    model: nn.Module | None
    history: History
    timings: dict[str, float]
    engine: str
    rounds: int
    n: int
    privacy: Spent | None = None
    stopped: str | None = None
    clients: ClientTable = field(default_factory=dict)

    @property
    def x(self) -> Tensor:
        return self.state.x

    @property
    def finished(self) -> bool:
        return self.state.round == self.rounds


@dataclass(frozen=True)
class Plan:
    """How a run is to go, every default filled in."""

    lr: float | Schedule
    rounds: int
    batch_size: int | None
    batch_rate: float | None
    warmup: int
    seed: int
    participation: Participation
    initial_memory: InitialMemory
    log_every: int
    evaluate_every: int
    full_gradient: bool
    diagnostics: bool = True  # whether un-noised functions of the clients' data are recorded (`history.UNNOISED`)
    precision: Precision = "tf32"
    memory: MemoryTable = field(default_factory=MemoryTable)
    secret: int | None = field(default=None, repr=False)
    weights: Tensor | None = None  # n·w_i of every client (`client_weights`); None: equal weights

    @property
    def privacy_seed(self) -> int:
        """The seed of what privacy rests on: noise, who is drawn, Poisson batches. Secret unless a seed was given."""
        return self.secret if self.secret is not None else self.seed

    @property
    def model_seed(self) -> int:
        """The seed of what models and transforms draw.

        Where records are drawn by coins, a record's mask of dropout is that of its place in the batch, and every mask
        moves with the records before it. So it must be as secret as the coins.
        """
        return self.privacy_seed if self.batch_rate is not None else self.seed

    def participants(self, clients: int, round: int) -> Tensor | None:
        """Who takes part in a round: increasing client numbers, or None for all of them."""
        return drawn_clients(self.participation, clients, round, self.privacy_seed)

    def step_size(self, k: int) -> float:
        """γ of round k; 0 in warm-up rounds, where the memories move towards the gradients and x stands still."""
        if k < self.warmup:
            return 0.0
        lr = self.lr(k) if callable(self.lr) else self.lr
        if not (math.isfinite(lr) and lr >= 0):
            raise UsageError(f"lr must be >= 0 and finite, got {lr} in round {k}")
        return lr

    def noise_variance(self, drawn: Tensor | None, clients: int) -> float:
        """The variance, in units of σ², of the noise in a sum of messages that carry their own: Σ (n·w_i)²."""
        if self.weights is None:
            return clients if drawn is None else len(drawn)
        return float((self.weights if drawn is None else self.weights[drawn]).square().sum())

    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on, in JSON: a checkpoint of another plan is refused."""
        facts = {name: value for name, value in vars(self).items() if name not in ("secret", "diagnostics", "weights")}
        if self.weights is not None:
            facts["weights"] = checksum(self.weights)
        if self.secret is not None:
            facts["seed"] = None
        if callable(self.lr):
            steps = json.dumps([float(self.lr(k)) for k in range(self.rounds)])
            facts["lr"] = f"a schedule, {hashlib.sha256(steps.encode()).hexdigest()[:16]}"
        facts["participation"] = repr(self.participation)
        facts["memory"] = str(self.memory.dtype)
        if isinstance(self.initial_memory, Tensor):
            facts["initial_memory"] = f"given, {checksum(self.initial_memory)}"
        return facts


def default_log_every(rounds: int) -> int:
    """Rounds between two rows of history, unless given: about 500 rows in all."""
    return max(1, rounds // 500)


def default_evaluate_every(rounds: int) -> int:
    """Rounds between two evaluations, unless given: about 20 in all."""
    return max(1, rounds // 20)


def record_clip_of(privacy: Privacy) -> RecordClip | None:
    """How a statement bounds every record's gradient; None where it does not."""
    return RecordClip(privacy.record_clip, privacy.by_layer) if privacy.record_clip is not None else None


def batches_of(problem: Objective, plan: Plan) -> BatchSource | None:
    """The batches a plan asks for; None for full local gradients."""
    if problem.sizes is None:
        return None
    if plan.batch_rate is not None:
        return PoissonBatches(problem.sizes, plan.batch_rate, plan.privacy_seed)
    return Batches(problem.sizes, plan.batch_size, plan.seed) if plan.batch_size is not None else None
