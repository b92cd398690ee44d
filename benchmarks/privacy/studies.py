"""The studies: data, number of clients, model, and tuning budget.

All of them protect a client against a server that sees only sums (zero-out, secure sum), with exact ε at δ = 1e-5.
Every training record belongs to exactly one client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normec.errors import one_of

from .search_space import SEARCH_SPACES
from .tuning import TuningBudget

EPSILONS = (8.0, 4.0, 2.0, 1.0)
SPLITS = ("iid", "label")


@dataclass(frozen=True)
class Study:
    """One study: the settings that all runs share, the splits and ε of its cells, and the tuning budget."""

    name: str
    shows: str
    settings: Mapping[str, Any]
    budget: TuningBudget
    epsilons: tuple[float, ...] = EPSILONS
    splits: tuple[str, ...] = SPLITS
    notes: tuple[str, ...] = field(default=())
    repeats: str = ""  # the study that is repeated with a larger tuning budget

    def cells(self) -> list[Cell]:
        """All cells in the order in which they are run; small ε come last, because most methods fail there."""
        return [
            Cell(self.name, method, epsilon, split)
            for split in self.splits
            for epsilon in self.epsilons
            for method in SEARCH_SPACES
        ]

    def shared_settings(self, cell: Cell) -> dict[str, Any]:
        """The settings that all methods share in the condition of a cell."""
        return {**self.settings, "epsilon": cell.epsilon, "split": cell.split}

    def expected(self, cell: Cell) -> dict[str, Any]:
        """The entries that the record of a cell must have: its condition, and the tuning budget with its seeds."""
        budget = self.budget
        seeds = {"tuning_seeds": [*budget.tuning_seeds], "test_seeds": [*budget.test_seeds]}
        own = {"study": self.name, "method": cell.method, **self.shared_settings(cell)}
        return {**own, "by": budget.by, "trials": budget.trials, **seeds}


@dataclass(frozen=True)
class Condition:
    """A study, an ε and a split, in which all methods are compared."""

    study: str
    epsilon: float
    split: str


@dataclass(frozen=True)
class Cell:
    """One method in one condition."""

    study: str
    method: str
    epsilon: float
    split: str

    @property
    def condition(self) -> Condition:
        return Condition(self.study, self.epsilon, self.split)

    @property
    def key(self) -> str:
        """The name of the cell within its study."""
        return f"{self.split}/{self.epsilon:g}/{self.method}"


# The validation sets are large, so one tuning seed and more settings are better than two seeds and fewer settings.
_LINEAR = TuningBudget(12, (0,), (2, 3, 4))
_RARE = replace(_LINEAR, steps=(0.1, 30.0), plain_steps=(1.0, 300.0), by="area")
_IMAGES = TuningBudget(6, (0,), (2, 3), plain_steps=(0.1, 10.0))
_SMALL = "the model has 24,346 parameters, because the noise grows with their number; ResNet20 has eleven times as many"
_MANY = {"data": "cifar10", "model": "cnn-gn", "clients": 10000, "precision": "bf16"}
_A9A = "A constant answer reaches 76.4 %"
_W8A = "The area is used because 3 % of the records are positive and a constant answer reaches 97.0 % accuracy"


def _linear(data: str, clients: int, budget: TuningBudget, model: str, *notes: str) -> Study:
    settings = {"data": data, "model": model, "clients": clients}
    kind = "logistic regression" if model == "logistic" else "softmax regression"
    return Study(f"{data}-{clients}", f"{kind} on {data}, {clients:,} clients", settings, budget, notes=notes)


STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        _linear("a9a", 100, _LINEAR, "logistic", _A9A),
        _linear("a9a", 1000, _LINEAR, "logistic", _A9A),
        _linear("w8a", 100, _RARE, "logistic", _W8A),
        _linear("w8a", 1000, _RARE, "logistic", _W8A),
        _linear("digits", 100, TuningBudget(15), "softmax"),
        Study(
            "fashion-mnist-1000",
            "a small CNN on Fashion-MNIST, 1,000 clients",
            {"data": "fashion-mnist", "model": "cnn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            notes=("Each client has 60 images of its own",),
        ),
        Study(
            "cifar10-1000",
            "a small CNN with GroupNorm on CIFAR-10, 1,000 clients",
            {"data": "cifar10", "model": "cnn-gn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            notes=("Each client has 50 images of its own; " + _SMALL,),
        ),
        Study(
            "cifar10-10000",
            "a small CNN with GroupNorm on CIFAR-10, 10,000 clients",
            _MANY,
            _IMAGES,
            notes=(
                "Each client has 5 images of its own (4 while tuning): no image is reused, so the clients are very "
                "small; " + _SMALL,
            ),
        ),
        Study(
            "cifar10-10000-longer",
            "the study cifar10-10000 with twice the settings and longer runs",
            _MANY,
            TuningBudget(12, (0,), (2, 3), rounds=(200, 400)),
            epsilons=(8.0, 2.0),
            notes=(
                "With six settings most methods chose the longest run. NormEC without SN, DP-Clip21 and DP-SGD with "
                "clipping also get longer steps",
            ),
            repeats="cifar10-10000",
        ),
    )
}


def named(names: Iterable[str]) -> list[Study]:
    """Studies by name, in the given order; "all" means every study."""
    found: list[Study] = []
    for name in names:
        one_of(("all", *STUDIES), study=name)
        found += STUDIES.values() if name == "all" else [STUDIES[name]]
    return list({study.name: study for study in found}.values())
