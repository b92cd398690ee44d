"""The workloads: models on synthetic records, which are the same for every implementation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from normec import Problem, UsageError
from normec.errors import at_least, one_of
from normec.gradients.precision import PRECISIONS, Precision
from normec.models import Built, build

from .models import MODELS, build_model

# Every implementation with error feedback runs NormEC(ALPHA, BETA) with server normalisation.
ALPHA, BETA, LR = 0.01, 0.1, 0.01


@dataclass(frozen=True)
class Workload:
    """A model, the shape of its records, and the participation of clients.

    A client uses `batch` of its `records` per round. All records come from one pool of at most `pool` records, the size
    of the data set with that shape; clients share records if they have more than that in total. Records are sequences
    of numbers below `vocabulary` if that is given; without `classes`, every position has a target. `peers` are the
    other libraries whose adapters can run the model.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: tuple[int, ...]
    records: int
    pool: int
    share: float = 1.0
    batch: int = 32
    vocabulary: int = 0
    peers: tuple[str, ...] = ("pfl", "flower", "jax", "opacus")

    @property
    def convolves(self) -> bool:
        """Whether convolutions are most of the model, whose pass "auto" does not compile on a GPU."""
        return self.model in ("resnet20", "cnn", "mobilenet", "resnet18")


WORKLOADS = {
    "resnet20": Workload("resnet20", (3, 32, 32), 10, clients=(10,), records=320, pool=50_000),
    "mlp": Workload("mlp", (784,), 10, clients=(100, 1_000), records=64, pool=60_000),
    "cnn": Workload("cnn", (1, 28, 28), 10, clients=(100,), records=64, pool=60_000, peers=("opacus",)),
    "logistic": Workload("logistic", (123,), 2, clients=(10_000,), records=64, pool=32_000, share=0.01),
    **{
        name: Workload(name, shape, classes, (10,), records=64, pool=10_000, vocabulary=vocabulary, peers=peers)
        for name, shape, classes, vocabulary, peers in (
            ("gpt", (64,), 0, 65, ("opacus",)),
            ("lora", (64,), 0, 65, ()),
            ("vit", (3, 32, 32), 10, 0, ()),
            ("bert", (64,), 4, 1_000, ()),
            ("lstm", (64,), 0, 65, ()),
            ("mobilenet", (3, 32, 32), 10, 0, ()),
            ("resnet18", (3, 32, 32), 10, 0, ()),
        )
    },
}


@dataclass(frozen=True)
class Case:
    """A workload with a number of clients, a device, a precision and a number of threads."""

    workload: str
    clients: int
    device: str = "cpu"
    precision: Precision = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        one_of(WORKLOADS, workload=self.workload)
        one_of(PRECISIONS, precision=self.precision)
        at_least(1, n=self.clients, threads=self.threads)
        if self.device == "cpu" and self.precision == "tf32":
            raise UsageError("tf32 is a precision of GPUs; on the CPU choose float32 or bf16")

    @property
    def spec(self) -> Workload:
        return WORKLOADS[self.workload]

    @property
    def drawn(self) -> int:
        """The number of clients that take part in a round."""
        return max(1, round(self.spec.share * self.clients))

    def lack_of_records(self, each: int) -> str | None:
        """Why the clients cannot have so many records each without a common one, if there are too few."""
        if self.clients * each <= self.spec.pool:
            return None
        return f"there are not enough records for {self.clients} clients without a common one"

    @property
    def images(self) -> bool:
        return len(self.spec.shape) == 3

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class WorkloadData:
    """The model and the records of a case on its device; `norm` is "group" if BatchNorm is not supported."""

    def __init__(self, case: Case, norm: str = "batch") -> None:
        self.case, spec = case, case.spec
        generator = torch.Generator().manual_seed(0)
        size = min(spec.pool, case.clients * spec.records)
        inputs = (
            torch.randint(spec.vocabulary, (size, *spec.shape), generator=generator)
            if spec.vocabulary
            else torch.randn(size, *spec.shape, generator=generator)
        )
        shape = (size,) if spec.classes else (size, *spec.shape)
        targets = torch.randint(spec.classes or spec.vocabulary, shape, generator=generator)
        self.inputs, self.targets = inputs.to(case.device), targets.to(case.device)
        self.rows = torch.randint(size, (case.clients, spec.records), generator=generator)
        self._groups = "-gn" if case.images and norm == "group" else ""

    @cached_property
    def built(self) -> Built:
        spec = self.case.spec
        if spec.model in MODELS:
            return build_model(spec.model, spec.shape, spec.classes, spec.vocabulary)
        return build(spec.model + self._groups, spec.shape, spec.classes)

    def problem(self, records: int | None = None, *, distinct: bool = False) -> Problem:
        """The problem for `normec.train`, with at most `records` records per client; `distinct`, no client shares one.

        Record-level privacy needs records that occur once.
        """
        whole = TensorDataset(self.inputs, self.targets)
        rows = self.rows[:, :records].tolist()
        if distinct:
            count = len(rows[0])
            if (lack := self.case.lack_of_records(count)) is not None:
                raise UsageError(lack)
            rows = torch.arange(self.case.clients * count).view(-1, count).tolist()
        return Problem(self.built.model, self.built.loss, [Subset(whole, own) for own in rows])

    def draw(self) -> list[int]:
        """Draw the clients of a round."""
        if self.case.drawn == self.case.clients:
            return list(range(self.case.clients))
        found: list[int] = torch.randperm(self.case.clients)[: self.case.drawn].tolist()
        return found

    def client_batch(self, client: int) -> tuple[Tensor, Tensor]:
        """Draw a batch of records of a client."""
        rows = self.rows[client, torch.randperm(self.case.spec.records)[: self.case.spec.batch]]
        return self.inputs[rows], self.targets[rows]

    def batch(self) -> tuple[Tensor, Tensor]:
        """The records of one round in one batch."""
        rows = self.rows[: self.case.drawn, : self.case.spec.batch].flatten()
        return self.inputs[rows], self.targets[rows]
