"""The plan of a run, the state that a round changes, and the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..algorithms.averaging import Averaging
from ..algorithms.local_steps import LocalSteps
from ..algorithms.lr_schedule import ScheduledLR
from ..algorithms.method import ESTIMATE, MEMORY, Method, Tables
from ..algorithms.server_optimizer import ServerOptimizer
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
    "averaging",
)  # of a plan: what is looked at, not what is computed
AVERAGE = "average"  # the name of the average of the iterates among the server's optimizer's tensors
ClientTable = dict[str, list[Any]]  # columns of equal length, one entry a client
Schedule = Callable[[int], float]
InitialMemory = Literal["zero", "gradient"] | Tensor


@dataclass
class State:
    """Everything that a round changes: the model, the named states of clients and server, buffers and counts.

    A client's states are rows of tables ``[n, …]``; on a rank the tables hold its own clients' rows. `optimizer` holds
    the tensors of the server's optimizer and the average of the iterates, in runs that have them.
    """

    round: int
    x: Tensor
    clients: Tables
    server: Tables
    buffers: Buffers
    messages: int = 0
    optimizer: Tables = field(default_factory=dict)

    @property
    def result(self) -> Tensor:
        """What is evaluated and returned: the average of the iterates where there is one, and otherwise x."""
        return self.optimizer.get(AVERAGE, self.x)

    @property
    def memory(self) -> Tensor:
        """The clients' memories g_i, ``[n, d]``, for a method with memories."""
        return self.clients[MEMORY]

    @property
    def estimate(self) -> Tensor:
        """The server's estimate ĝ, ``[d]``, for a method with an estimate. With error feedback, ĝ = Σ w_i g_i."""
        return self.server[ESTIMATE]


@dataclass
class Run:
    """The result of `train`.

    `x` is the final model as a vector, and `finished` says whether all rounds were done. Where iterates are averaged,
    `x` and `model` are the average, and `state.x` is the last iterate.

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
        return self.state.result

    @property
    def finished(self) -> bool:
        return self.state.round == self.rounds


@dataclass(frozen=True)
class Plan:
    """All settings of a run, with every default filled in."""

    lr: float | tuple[float, ...] | ScheduledLR  # a schedule has one number for every round
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
    diagnostics: bool = True  # whether functions of the data without noise are recorded (`history.UNNOISED`)
    precision: Precision = "tf32"
    memory: MemoryTable = field(default_factory=MemoryTable)
    local: LocalSteps | None = None  # its batch_size is None: the plan's counts
    secret: int | None = field(default=None, repr=False)
    server_optimizer: ServerOptimizer | None = None  # None: x ← x − lr · direction
    averaging: Averaging | None = None
    weights: Tensor | None = None  # n·w_i of every client (`client_weights`); None: equal weights

    @property
    def privacy_seed(self) -> int:
        """The seed of everything that privacy depends on: noise, sampling of clients, Poisson batches.

        It is secret unless a seed was given.
        """
        return self.secret if self.secret is not None else self.seed

    @property
    def model_seed(self) -> int:
        """The seed of the random numbers of models and transforms.

        The dropout mask of a record depends on its position, and so on which records stand before it. If the masks were
        known, leaving out one record would show in those of all later ones. So this seed is as secret as the sampling.
        """
        return self.privacy_seed

    def participants(self, clients: int, round: int) -> Tensor | None:
        """Return the clients that take part in a round: increasing numbers, or None for all of them."""
        return drawn_clients(self.participation, clients, round, self.privacy_seed)

    def step_size(self, k: int) -> float:
        """Return γ of round k; 0 in warm-up rounds, in which the memories move towards the gradients and x rests."""
        if k < self.warmup:
            return 0.0
        if isinstance(self.lr, ScheduledLR):
            return self.lr(k)
        return self.lr[k] if isinstance(self.lr, tuple) else self.lr

    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on, in JSON: a checkpoint of another plan is refused."""
        apart = ("secret", "diagnostics", "local", "weights")
        facts = {name: value for name, value in vars(self).items() if name not in apart}
        # A run without local steps or weights keeps the identity that it had before there were any.
        if self.local is not None:
            facts["local"] = self.local.settings()
        if self.weights is not None:
            facts["weights"] = checksum(self.weights)
        if self.secret is not None:
            facts["seed"] = None
        if not isinstance(self.lr, float):
            sizes = self.lr if isinstance(self.lr, tuple) else [self.lr(k) for k in range(self.rounds)]
            steps = json.dumps(sizes)
            facts["lr"] = f"a schedule, {hashlib.sha256(steps.encode()).hexdigest()[:16]}"
        # A run without an optimizer or an average keeps the identity that it had before there were any.
        del facts["server_optimizer"], facts["averaging"]
        if self.server_optimizer is not None:
            facts["server_optimizer"] = self.server_optimizer.spec()
        if self.averaging is not None:
            facts["averaging"] = dataclasses.asdict(self.averaging)
        facts["participation"] = repr(self.participation)
        facts["memory"] = str(self.memory.dtype)
        if isinstance(self.initial_memory, Tensor):
            facts["initial_memory"] = f"given, {checksum(self.initial_memory)}"
        return facts


def default_log_every(rounds: int) -> int:
    """Return the default number of rounds between two rows of history, for about 500 rows."""
    return max(1, rounds // 500)


def default_evaluate_every(rounds: int) -> int:
    """Return the default number of rounds between two evaluations, for about 20 evaluations."""
    return max(1, rounds // 20)


def record_clip_of(privacy: Privacy) -> RecordClip | None:
    """How a statement bounds every record's gradient; None where it does not."""
    return RecordClip(privacy.record_clip, privacy.by_layer) if privacy.record_clip is not None else None


def batches_of(problem: Objective, plan: Plan) -> BatchSource | None:
    """Return the batches of a plan; None for full local gradients."""
    if problem.sizes is None:
        return None
    if plan.batch_rate is not None:
        return PoissonBatches(problem.sizes, plan.batch_rate, plan.privacy_seed)
    return Batches(problem.sizes, plan.batch_size, plan.seed) if plan.batch_size is not None else None
