"""The studies: which data, how many clients, which model, how hard every method is tried.

All protect a client against a server that sees sums alone (zero-out, secure sum), at δ = 1e-5 and exact ε. Every
training record belongs to one client, whatever their number: none is reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normec.errors import one_of

from .contenders import CONTENDERS
from .tuned import Effort

EPSILONS = (8.0, 4.0, 2.0, 1.0)
SPLITS = ("iid", "label")


@dataclass(frozen=True)
class Study:
    """One table: settings that all runs share, the splits and ε of its cells, and the effort."""

    name: str
    shows: str
    settings: Mapping[str, Any]
    effort: Effort
    epsilons: tuple[float, ...] = EPSILONS
    splits: tuple[str, ...] = SPLITS
    notes: tuple[str, ...] = field(default=())
    instead: str = ""  # of the study that it repeats with more effort

    def cells(self) -> list[Place]:
        """Every cell, in the order they are run: strong targets last, for they matter least where all fail."""
        return [
            Place(self.name, method, epsilon, split)
            for split in self.splits
            for epsilon in self.epsilons
            for method in CONTENDERS
        ]

    def where(self, place: Place) -> dict[str, Any]:
        """The settings that the methods of a cell share."""
        return {**self.settings, "epsilon": place.epsilon, "split": place.split}

    def asked(self, place: Place) -> dict[str, Any]:
        """What the record of a cell must say: where it stands, and how hard it was tried, with which seeds."""
        effort = self.effort
        seeds = {"tuning_seeds": [*effort.tuning_seeds], "test_seeds": [*effort.test_seeds]}
        cell = {"study": self.name, "method": place.method, **self.where(place)}
        return {**cell, "by": effort.by, "trials": effort.trials, **seeds}


@dataclass(frozen=True)
class Place:
    """Where a cell stands: its study, method, ε and split."""

    study: str
    method: str
    epsilon: float
    split: str

    @property
    def key(self) -> str:
        return f"{self.split}/{self.epsilon:g}/{self.method}"


# One tuning seed and more settings beat two seeds and fewer: validation sets are large here.
_LINEAR = Effort(12, (0,), (2, 3, 4))
_RARE = replace(_LINEAR, steps=(0.1, 30.0), plain_steps=(1.0, 300.0), by="area")
_IMAGES = Effort(6, (0,), (2, 3), plain_steps=(0.1, 10.0))
_SMALL = "24,346 parameters: the noise grows with their number, and ResNet20 has eleven times as many"
_MANY = {"data": "cifar10", "model": "cnn-gn", "clients": 10000, "precision": "bf16"}
_A9A = "A constant answer has 76.4 %"
_W8A = "3 % of the records are positive, and a constant answer has 97.0 % accuracy: the area says more"


def _linear(data: str, clients: int, effort: Effort, model: str, *notes: str) -> Study:
    settings = {"data": data, "model": model, "clients": clients}
    kind = "logistic regression" if model == "logistic" else "softmax regression"
    return Study(f"{data}-{clients}", f"{kind} on {data}, {clients:,} clients", settings, effort, notes=notes)


STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        _linear("a9a", 100, _LINEAR, "logistic", _A9A),
        _linear("a9a", 1000, _LINEAR, "logistic", _A9A),
        _linear("w8a", 100, _RARE, "logistic", _W8A),
        _linear("w8a", 1000, _RARE, "logistic", _W8A),
        _linear("digits", 100, Effort(15), "softmax"),
        Study(
            "fashion-mnist-1000",
            "a small CNN on Fashion-MNIST, 1,000 clients",
            {"data": "fashion-mnist", "model": "cnn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            notes=("60 images a client, each client's own",),
        ),
        Study(
            "cifar10-1000",
            "a small CNN with GroupNorm on CIFAR-10, 1,000 clients",
            {"data": "cifar10", "model": "cnn-gn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            notes=("50 images a client, each client's own; " + _SMALL,),
        ),
        Study(
            "cifar10-10000",
            "a small CNN with GroupNorm on CIFAR-10, 10,000 clients",
            _MANY,
            _IMAGES,
            notes=(
                "5 images a client, each client's own (4 while tuning). No image is reused: 50,000 images allow that, "
                "at the price of very small clients; " + _SMALL,
            ),
        ),
        Study(
            "cifar10-10000-longer",
            "the same with twice the settings and longer runs",
            _MANY,
            Effort(12, (0,), (2, 3), rounds=(200, 400)),
            epsilons=(8.0, 2.0),
            notes=(
                "For with six settings most methods chose the longest run. NormEC without SN, DP-Clip21 and DP-SGD "
                "with clipping also get longer steps",
            ),
            instead="cifar10-10000",
        ),
    )
}


def named(names: Iterable[str]) -> list[Study]:
    """Studies by name, in the order asked; "all" is every one."""
    found: list[Study] = []
    for name in names:
        one_of(("all", *STUDIES), study=name)
        found += STUDIES.values() if name == "all" else [STUDIES[name]]
    return list({study.name: study for study in found}.values())
