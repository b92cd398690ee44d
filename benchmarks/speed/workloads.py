"""The workloads: three models on synthetic records, which are the same for every implementation."""

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

# Every implementation with error feedback runs NormEC(ALPHA, BETA) with server normalisation.
ALPHA, BETA, LR = 0.01, 0.1, 0.01


@dataclass(frozen=True)
class Workload:
    """A model, the shape of its records, and the participation of clients.

    A client uses `batch` of its `records` per round. All records come from one pool of at most `pool` records, the size
    of the data set with that shape; clients share records if they have more than that in total.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: tuple[int, ...]
    records: int
    pool: int
    share: float = 1.0
    batch: int = 32


WORKLOADS = {
    "resnet20": Workload("resnet20", (3, 32, 32), 10, clients=(10,), records=320, pool=50_000),
    "mlp": Workload("mlp", (784,), 10, clients=(100, 1_000, 10_000), records=64, pool=60_000),
    "logistic": Workload("logistic", (123,), 2, clients=(10_000,), records=64, pool=32_000, share=0.01),
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
        self.inputs = torch.randn(size, *spec.shape, generator=generator).to(case.device)
        self.targets = torch.randint(spec.classes, (size,), generator=generator).to(case.device)
        self.rows = torch.randint(size, (case.clients, spec.records), generator=generator)
        self._groups = "-gn" if case.images and norm == "group" else ""

    @cached_property
    def built(self) -> Built:
        return build(self.case.spec.model + self._groups, self.case.spec.shape, self.case.spec.classes)

    def problem(self, records: int | None = None) -> Problem:
        """The problem for `normec.train`, with at most `records` records per client."""
        whole = TensorDataset(self.inputs, self.targets)
        rows = self.rows[:, :records].tolist()
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
