"""The plan of a run, the state that a round changes, and the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..algorithms.averaging import Averaging
from ..algorithms.local_steps import LocalSteps
from ..algorithms.lr_schedule import ScheduledLR
from ..algorithms.method import ESTIMATE, MEMORY, Method, Tables
from ..algorithms.server_optimizer import ServerOptimizer
from ..errors import UsageError
from ..gradients.precision import Precision
from ..gradients.record_clip import RecordClip
from ..problems.objective import Buffers, Objective, checksum
from ..sampling.batches import Batches, BatchSource, PoissonBatches
from ..sampling.participation import Participation, drawn_clients
from ..storage.history import History, in_a_line
from .memory_table import MemoryTable
from .prediction import PREDICTED, predicted

if TYPE_CHECKING:
    from ..privacy.ledger import Payments
    from ..privacy.mechanism import Spent
    from ..privacy.statement import Privacy

# The settings of a plan that decide what is looked at, not what is computed.
LOGGING_SETTINGS = ("log_every", "evaluate_every", "full_gradient", "averaging")
AVERAGE = "average"  # the name of the average of the iterates among the tensors of the server's optimizer
ClientTable = dict[str, list[Any]]  # columns of equal length, with one entry for each client
Schedule = Callable[[int], float]
InitialMemory = Literal["zero", "gradient"] | Tensor


@dataclass
class State:
    """Everything that a round changes: the model, the named states of clients and server, buffers and counts.

    A client's states are rows of tables ``[n, …]``; on a rank the tables hold its own clients' rows. `optimizer` holds
    the tensors of the server's optimizer and the average of the iterates, in runs that have them, and `noise` what
    correlated noise needs of past rounds.
    """

    round: int
    x: Tensor
    clients: Tables
    server: Tables
    buffers: Buffers
    messages: int = 0
    optimizer: Tables = field(default_factory=dict)
    noise: Tables = field(default_factory=dict)

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


@dataclass(repr=False)
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
        stopped: Why the run ended early, if it did: "interrupted", the reason of a callback, or what the ledger said.
        clients: Each client at the end, by column; empty in a private run without diagnostics.
        settings: Every setting with the value that was used, as config.toml has it.
        folder: The folder of the run; None if nothing was kept on disk.
        transform: What the problem applies to every batch before the model.
        payments: What a private run without a folder paid, for the ledger that `save` writes.
        majority: The test accuracy of always naming the most frequent class.

    Example:
        >>> import torch
        >>> from normec import GD, Problem, train
        >>> problem = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(2))
        >>> run = train(problem, GD(), lr=0.25, rounds=2)
        >>> run.x, run.finished, run.history["loss"]
        (tensor([0.2500, 0.2500]), True, [2.0, 0.5, 0.125])
        >>> run
        Run(gd, 2 of 2 rounds, loss 0.125)
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
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    transform: Callable[[Any], Any] | None = field(default=None, repr=False)
    payments: Payments | None = field(default=None, repr=False)
    majority: float | None = field(default=None, repr=False)

    @property
    def x(self) -> Tensor:
        return self.state.result

    @property
    def finished(self) -> bool:
        return self.state.round == self.rounds

    def __repr__(self) -> str:
        """Return the result in a line; tensors of thousands of numbers are in `state`."""
        from ..privacy.display import shown_epsilon

        made = f"{self.method.name}, {self.state.round} of {self.rounds} rounds"
        epsilon = None if self.privacy is None else shown_epsilon(self.privacy.epsilon)
        return f"Run({in_a_line(made, self.history, epsilon, self.stopped, self.folder)})"

    def predict(self, inputs: Any, batch_size: int = PREDICTED) -> Any:
        """Return the outputs of the final model, transformed as the problem's inputs are.

        Args:
            inputs: A tensor or a NumPy array ``[N, ...]``, or a dict, list or tuple of them, as the model takes them.
            batch_size: Inputs at a time.

        Returns:
            The outputs for all inputs, on the host and without gradients.

        Raises:
            UsageError: The problem consists of plain functions, or the inputs are not tensors of one length that fit
                the model.
        """
        if self.model is None:
            raise UsageError("a problem of plain functions has no model to predict with")
        return predicted(self.model, inputs, self.transform, batch_size)

    def plot(self, path: str | Path | None = None, columns: list[str] | None = None) -> Any:
        """Draw the history, one panel per column; matplotlib is needed.

        Args:
            path: Where to save the figure; its suffix decides the format (default: nowhere).
            columns: The columns of the history (default: all results that were measured).

        Returns:
            The matplotlib figure, which a notebook shows.

        Raises:
            UsageError: The history has no such column.
        """
        from ..report.pictures import history_figure

        return history_figure(self.history, path, columns)

    def save(self, folder: str | Path) -> Path:
        """Write the result to a new folder: settings, history, summary, page, model and, if it is private, the ledger.

        `normec.load`, `normec results` and the pages read the folder. It has no checkpoint: for a run that can be
        continued, give `out` to `train`.

        Args:
            folder: A folder that does not exist yet, or is empty.

        Returns:
            The folder.

        Raises:
            UsageError: The folder is not empty, or the run cannot be saved by this rank.
        """
        from .summary import save_run

        return save_run(self, Path(folder))


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
    mask_secret: int | None = field(default=None, repr=False)
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
        known, leaving out one record would show in those of all later ones. So this seed is as secret as the sampling,
        and where records are clipped under noise that cannot be repeated, it is a secret whatever seed was given. The
        order in which batches take the records is then made of the same secret (`batches_of`).
        """
        return self.mask_secret if self.mask_secret is not None else self.privacy_seed

    @property
    def kept_secret(self) -> int | None:
        """The secret that the folder of the run keeps, so that a stopped run can continue with it."""
        return self.secret if self.secret is not None else self.mask_secret

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

    def evaluates(self, k: int) -> bool:
        """Return whether x^k is evaluated: every `evaluate_every` rounds.

        With the default number, also in the rows 1, 2, 4, 8, … of the history before round `evaluate_every`, because a
        model changes most at the start. So at any row, at most half of the rounds were made since the last evaluation.
        """
        row, rest = divmod(k, self.log_every)
        early = rest == 0 and row & (row - 1) == 0 and k < self.evaluate_every == default_evaluate_every(self.rounds)
        return k % self.evaluate_every == 0 or early

    def adds_row(self, k: int) -> bool:
        """Return whether the history has a row of x^k."""
        return k % self.log_every == 0 or self.evaluates(k)

    def identity(self) -> dict[str, Any]:
        """Return all that the numbers depend on, in JSON: a checkpoint of another plan is refused."""
        # Settings that older versions did not know are left out where they are not used, so that runs of these versions
        # can be continued.
        optional = ("local", "weights", "server_optimizer", "averaging")
        apart = ("secret", "mask_secret", "diagnostics", *optional)
        facts = {name: value for name, value in vars(self).items() if name not in apart}
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
    """Return the default number of rounds between two evaluations, for about 20 evaluations after the first rounds."""
    return max(1, rounds // 20)


def record_clip_of(privacy: Privacy) -> RecordClip | None:
    """Return how a statement bounds every record's gradient; None if it does not."""
    return RecordClip(privacy.record_clip, privacy.by_layer) if privacy.record_clip is not None else None


def batches_of(problem: Objective, plan: Plan) -> BatchSource | None:
    """Return the batches of a plan; None for full local gradients."""
    if problem.sizes is None:
        return None
    if plan.batch_rate is not None:
        return PoissonBatches(problem.sizes, plan.batch_rate, plan.privacy_seed)
    if plan.batch_size is None:
        return None
    # Like a mask, the place of a record in this order depends on the records before it (`Plan.model_seed`).
    order = plan.seed if plan.mask_secret is None else plan.mask_secret
    return Batches(problem.sizes, plan.batch_size, order)
