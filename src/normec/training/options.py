"""The arguments of `train`, with those that most runs leave alone in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ..algorithms.averaging import Averaging, Kind
from ..algorithms.local_steps import LocalSteps
from ..algorithms.lr_schedule import LRSchedule, SchedulerFactory
from ..algorithms.server_optimizer import OptimizerFactory, ServerOptimizer
from ..errors import UsageError, at_least, non_negative, one_of
from ..gradients.engine import Engine
from ..gradients.precision import PRECISIONS, Precision
from ..sampling.participation import Participation
from .callbacks import Callback
from .client_weights import Weights
from .communicator import Communicator
from .memory_table import HOMES, Home
from .run import InitialMemory, Schedule

if TYPE_CHECKING:
    from ..privacy.statement import Privacy


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What a run records in its history, and how often.

    Args:
        every: Rounds between two rows of history (default: about 500 rows in all).
        evaluate_every: Rounds between two evaluations on the test and validation sets (default: about 20 evaluations in
            all, and more in the first rounds, at the rows 1, 2, 4, 8, … of the history).
        full_gradient: Record the exact f, ‖∇f‖ and memory error even if training uses batches or samples clients.
            Every row then costs a pass over all data.
        diagnostics: In a private run, also record the clients' losses, gradient norms, memory errors and message
            norms, and fill `Run.clients`. They are measured without noise, and the guarantee does not cover them. A run
            without privacy always records them.
        profile: Profile some rounds after the first ones: trace.json.gz, in the folder of the run, opens in
            ui.perfetto.dev, and profile.json and the page say where a round's time goes. Neither contains values of
            tensors. Of a private run the trace has no shapes either, but times depend on the data, and the guarantee
            does not cover them.

    Raises:
        UsageError: A number of rounds is below 1.

    Example:
        >>> Logging(every=1).evaluate_every is None
        True
        >>> Logging(every=0)
        Traceback (most recent call last):
        ...
        normec.errors.UsageError: log_every must be a whole number >= 1, got 0
    """

    every: int | None = None
    evaluate_every: int | None = None
    full_gradient: bool = False
    diagnostics: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        given = {"log_every": self.every, "evaluate_every": self.evaluate_every}
        at_least(1, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The clients' memories g_i: their first values, and how the table of them is kept.

    Args:
        initial: g_i⁰ is "zero", the first "gradient" (with local steps, the first update), or a tensor ``[d]`` or
            ``[n, d]``. ĝ⁰ is the mean of the g_i⁰, by the clients' weights.
        dtype: The type of the table: bfloat16, float32 or float64 (default: that of the model).
        home: The table is kept on the "device", in "host" memory, or in a file on "disk". The last two are for tables
            that do not fit on the device.

    Raises:
        UsageError: The type or the home is unknown.

    Example:
        >>> Memory(initial="gradient", home="host").dtype is None
        True
    """

    initial: InitialMemory = "zero"
    dtype: torch.dtype | None = None
    home: Home = "device"

    def __post_init__(self) -> None:
        one_of(HOMES, memory_home=self.home)
        if self.dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise UsageError(f"memory_dtype must be bfloat16, float32 or float64, got {self.dtype}")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How gradients are computed, and by how many processes.

    Args:
        dtype: The type of the model and of the messages (default: that of the model's parameters).
        engine: How the clients' gradients are computed: "auto", "loop", "shared", "batched", "linear", "compiled",
            "recorded", or an engine of your own.
        precision: How a GPU multiplies matrices: "float32", "tf32", or "bf16" for forward and backward passes. The
            model and the messages keep their type.
        communicator: Spreads the clients over the processes of a job (`normec.distributed.join`). Every rank makes the
            same call and returns the same run; rank 0 writes the files and calls the callbacks.

    Raises:
        UsageError: The precision is unknown.

    Example:
        >>> Compute(engine="loop", precision="float32").engine
        'loop'
    """

    dtype: torch.dtype | None = None
    engine: str | Engine = "auto"
    precision: Precision = "tf32"
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        one_of(PRECISIONS, precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a run keeps its files in the folder `out`.

    Args:
        checkpoint_seconds: Seconds between two checkpoints; 0 writes one after every round.
        witness: A file in another folder, one for each private run, that also counts the lines of the ledger. A folder
            that was restored to an older state, or deleted and begun again, has lost releases and is then refused.

    Raises:
        UsageError: The number of seconds is negative or not finite.

    Example:
        >>> Storage().checkpoint_seconds
        30.0
    """

    checkpoint_seconds: float = 30.0
    witness: str | Path | None = None

    def __post_init__(self) -> None:
        non_negative(checkpoint_seconds=self.checkpoint_seconds)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `train`, which documents them."""

    lr: float | Schedule | Literal["theory"] | None = None
    rounds: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    batch_rate: float | None = None
    local: LocalSteps | None = None
    warmup: int = 0
    lr_schedule: str | LRSchedule | SchedulerFactory | None = None
    server_optimizer: str | ServerOptimizer | OptimizerFactory | None = None
    averaging: Kind | Averaging | None = None
    privacy: Privacy | None = None
    public_sizes: bool = False
    participation: Participation | None = None
    weights: Weights = "equal"
    seed: int | None = None
    device: str | torch.device | None = None
    out: str | Path | None = None
    callbacks: Sequence[Callback] = ()
    logging: Logging = Logging()
    memory: Memory = Memory()
    compute: Compute = Compute()
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        for group in (Logging, Memory, Compute, Storage):
            name = group.__name__.lower()
            if not isinstance(given := getattr(self, name), group):
                fields = ", ".join(f"{field.name}=…" for field in dataclasses.fields(group))
                raise UsageError(f"{name} must be a normec.{group.__name__}({fields}), got {given!r}")
        if self.local is not None and not isinstance(self.local, LocalSteps):
            raise UsageError(f"local must be a normec.LocalSteps(steps=…, lr=…), got {self.local!r}")


def device_of(name: str | torch.device) -> torch.device:
    """Return the device of that name; raises `UsageError` if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"there is no device {str(name)!r} here; use cpu, or cuda where there is a GPU") from None
    return device
