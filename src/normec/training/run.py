"""What a run is: the plan it follows, the state that a round changes, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..algorithms.method import ESTIMATE, MEMORY, Method, Tables
from ..gradients.precision import Precision
from ..problems.client_data import checksum
from ..problems.objective import Buffers, Objective
from ..sampling.batches import Batches, BatchSource, PoissonBatches
from ..sampling.participation import Participation, drawn_clients
from ..storage.history import History
from .memory_table import MemoryTable

if TYPE_CHECKING:
    from ..privacy.mechanism import Spent

WATCHING = ("log_every", "evaluate_every", "full_gradient")  # of a plan: what is looked at, not what is computed
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
        """The server's estimate ĝ, ``[d]``, of a method that has one. With error feedback, ĝ = mean g_i."""
        return self.server[ESTIMATE]


@dataclass
class Run:
    """What training leaves behind.

    `x` is the final model as a vector, `model` as a module; `history` has the rows, `privacy` what was spent, and
    `stopped` says why a run ended early.
    """

    method: Method
    state: State
    model: nn.Module | None
    history: History
    timings: dict[str, float]
    engine: str
    rounds: int
    n: int  # clients
    privacy: Spent | None = None
    stopped: str | None = None  # why it ended early: "interrupted", or the ledger's word
    clients: ClientTable = field(default_factory=dict)  # each client at the end, one by one; empty without diagnostics

    @property
    def x(self) -> Tensor:
        return self.state.x

    @property
    def finished(self) -> bool:
        return self.state.round == self.rounds


@dataclass(frozen=True)
class Plan:
    """How a run is to go, every default filled in."""

    lr: float | tuple[float, ...]  # one number for every round where they differ
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

    @property
    def coins(self) -> int:
        """The seed of what privacy rests on: noise, who is drawn, Poisson batches. Secret unless a seed was given."""
        return self.secret if self.secret is not None else self.seed

    @property
    def draws(self) -> int:
        """The seed of what models and transforms draw.

        Where records are drawn by coins, a record's mask of dropout is that of its place in the batch, and every mask
        moves with the records before it. So it must be as secret as the coins.
        """
        return self.coins if self.batch_rate is not None else self.seed

    def drawn(self, clients: int, round: int) -> Tensor | None:
        """Who takes part in a round: increasing client numbers, or None for all of them."""
        return drawn_clients(self.participation, clients, round, self.coins)

    def step_size(self, k: int) -> float:
        """γ of round k; 0 in warm-up rounds, where the memories move towards the gradients and x stands still."""
        if k < self.warmup:
            return 0.0
        return self.lr[k] if isinstance(self.lr, tuple) else self.lr

    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on, in JSON: a checkpoint of another plan is refused."""
        facts = {name: value for name, value in vars(self).items() if name not in ("secret", "diagnostics")}
        if self.secret is not None:
            facts["seed"] = None
        if isinstance(self.lr, tuple):
            steps = json.dumps(self.lr)
            facts["lr"] = f"a schedule, {hashlib.sha256(steps.encode()).hexdigest()[:16]}"
        facts["participation"] = repr(self.participation)
        facts["memory"] = str(self.memory.dtype)
        if isinstance(self.initial_memory, Tensor):
            facts["initial_memory"] = f"given, {checksum(self.initial_memory)}"
        return facts


def usual_log_every(rounds: int) -> int:
    """Rounds between two rows of history, unless given: about 500 rows in all."""
    return max(1, rounds // 500)


def usual_evaluate_every(rounds: int) -> int:
    """Rounds between two evaluations, unless given: about 20 in all."""
    return max(1, rounds // 20)


def batches_of(problem: Objective, plan: Plan) -> BatchSource | None:
    """The batches a plan asks for; None for full local gradients."""
    if problem.sizes is None:
        return None
    if plan.batch_rate is not None:
        return PoissonBatches(problem.sizes, plan.batch_rate, plan.coins)
    return Batches(problem.sizes, plan.batch_size, plan.seed) if plan.batch_size is not None else None
