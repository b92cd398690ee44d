"""The studies: data, number of clients, model, contenders, and tuning budget.

A new study is one entry of `STUDIES`, or a `Study` in a file of your own: `python -m benchmarks.privacy run
FILE.py:NAME`. Unless its settings say otherwise, a study protects a client against a server that sees only sums
(zero-out, secure sum), with exact ε at δ = 1e-5. Every training record belongs to exactly one client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normec.errors import UsageError, one_of

from .contenders import ALL, CONTENDERS, RECORD_CONTENDERS, Contender
from .tuning import TuningBudget

EPSILONS = (8.0, 4.0, 2.0, 1.0)
SPLITS = ("iid", "label")


@dataclass(frozen=True)
class Study:
    """One study: the settings that all runs share, the splits, ε and contenders of its cells, and the tuning budget."""

    name: str
    shows: str
    settings: Mapping[str, Any]
    budget: TuningBudget
    epsilons: tuple[float, ...] = EPSILONS
    splits: tuple[str, ...] = SPLITS
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    notes: tuple[str, ...] = field(default=())
    seconds_per_round: float = 0.01  # about, with one process or GPU; for the estimate before a run
    published: float | None = None  # what others report, in percent
    own: Mapping[str, Contender] = field(default_factory=dict)  # contenders of this study alone

    def contender(self, name: str) -> Contender:
        """A contender of this study by name."""
        return self.own[name] if name in self.own else ALL[name]

    def cells(self) -> list[Cell]:
        """All cells in the order in which they are run; small ε come last, because most methods fail there."""
        return [
            Cell(self.name, method, epsilon, split)
            for split in self.splits
            for epsilon in self.epsilons
            for method in self.contenders
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
_LONG = (("steps", (0.1, 30.0)), ("plain_steps", (1.0, 300.0)), ("server_steps", (3.0, 300.0)))
_RARE = replace(_LINEAR, roles=_LONG, by="area")
_IMAGES = TuningBudget(6, (0,), (2, 3), roles=(("plain_steps", (0.1, 10.0)),))
_SMALL = "the model has 24,346 parameters, because the noise grows with their number; ResNet20 has eleven times as many"
_A9A = "A constant answer reaches 76.4 %"
_W8A = "The area is used because 3 % of the records are positive and a constant answer reaches 97.0 % accuracy"
_FIRST = ("NormEC", "NormEC, no SN", "NormEC, forgetting", "DP-Clip21", "DP-SGD, norm", "DP-SGD, clip")
_REMEMBERING = (
    "DP-SGD, norm, momentum",
    "NormEC, forgetting",
    "DP-SGD, norm, Adam",
    "DP-SGD, norm",
    "NormEC, forgetting, momentum",
)
_FEATURES = {"model": "softmax", "features": "scattering", "augment": False}
_RECORDS = {"clients": 1, "unit": "record", "trust": "central"}
_UNIT_NORM = (("steps", (0.1, 10.0)), ("plain_steps", (1.0, 300.0)), ("adam_steps", (0.0005, 0.03)))


def _features(data: str, shown: str, published: float) -> Study:
    """A study at record level beside Tramèr and Boneh's accuracy with the same features."""
    return Study(
        f"{data}-records",
        f"softmax regression on scattering features of {shown}, each record protected, a trusted server",
        {"data": data, **_FEATURES, **_RECORDS},
        TuningBudget(6, (0,), (2, 3, 4), rounds=(50, 100), roles=_UNIT_NORM),
        epsilons=(3.0,),
        splits=("iid",),
        contenders=tuple(RECORD_CONTENDERS),
        notes=(f"Tramèr and Boneh (2021) report {published} % with a linear model on these features",),
        published=published,
    )


def _network(data: str, shown: str, model: str, published: float) -> Study:
    """A study at record level beside Tramèr and Boneh's accuracy with the same network."""
    return Study(
        f"{data}-records-cnn",
        f"the CNN of Tramèr and Boneh on {shown}, end to end, each record protected, a trusted server",
        {"data": data, "model": f"benchmarks/privacy/tanh_cnns.py:{model}", "augment": False, **_RECORDS},
        TuningBudget(6, (0,), (2, 3, 4), rounds=(100, 200), roles=_UNIT_NORM),
        epsilons=(3.0,),
        splits=("iid",),
        contenders=("DP-GD, records clipped, momentum", "DP-GD, AUTO-S, momentum"),
        notes=(f"Tramèr and Boneh (2021) report {published} % with this network",),
        seconds_per_round=0.1,
        published=published,
    )


def _linear(data: str, clients: int, budget: TuningBudget, model: str, seconds: float, *notes: str) -> Study:
    settings = {"data": data, "model": model, "clients": clients}
    kind = "logistic regression" if model == "logistic" else "softmax regression"
    shows = f"{kind} on {data}, {clients:,} clients"
    return Study(f"{data}-{clients}", shows, settings, budget, notes=notes, seconds_per_round=seconds)


STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        _linear("a9a", 100, _LINEAR, "logistic", 0.004, _A9A),
        _linear("a9a", 1000, _LINEAR, "logistic", 0.007, _A9A),
        _linear("w8a", 100, _RARE, "logistic", 0.008, _W8A),
        _linear("w8a", 1000, _RARE, "logistic", 0.01, _W8A),
        _linear("digits", 100, TuningBudget(15), "softmax", 0.003),
        Study(
            "fashion-mnist-1000",
            "a small CNN on Fashion-MNIST, 1,000 clients",
            {"data": "fashion-mnist", "model": "cnn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            contenders=_FIRST,
            notes=("Each client has 60 images of its own",),
        ),
        Study(
            "cifar10-1000",
            "a small CNN with GroupNorm on CIFAR-10, 1,000 clients",
            {"data": "cifar10", "model": "cnn-gn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            contenders=_FIRST,
            notes=("Each client has 50 images of its own; " + _SMALL,),
        ),
        Study(
            "cifar10-10000",
            "a small CNN with GroupNorm on CIFAR-10, 10,000 clients",
            {
                "data": "cifar10",
                "model": "cnn-gn",
                "clients": 10000,
                "precision": "bf16",
                "averaging": "ema",
                "averaging_decay": 0.98,
            },
            TuningBudget(
                6,
                (0,),
                (2, 3, 4),
                rounds=(200, 400),
                roles=(("plain_steps", (0.1, 10.0)), ("adam_steps", (0.0005, 0.03))),
            ),
            epsilons=(8.0, 2.0),
            contenders=_REMEMBERING,
            notes=(
                "Each client has 5 images of its own (4 while tuning): no image is reused, so the clients are very "
                "small; " + _SMALL,
                "The model that is evaluated is a moving average of the iterates, which costs no privacy",
            ),
            seconds_per_round=0.014,
        ),
        Study(
            "cifar10-features-10000",
            "softmax regression on scattering features of CIFAR-10, 10,000 clients",
            {"data": "cifar10", **_FEATURES, "clients": 10000},
            TuningBudget(6, (0,), (2, 3, 4), rounds=(100, 200), roles=_UNIT_NORM),
            epsilons=(8.0,),
            contenders=("DP-SGD, norm, momentum", "NormEC, forgetting", "DP-SGD, norm"),
            notes=("Each client has 5 images of its own; nothing about the features is learned",),
            seconds_per_round=0.02,
        ),
        _features("cifar10", "CIFAR-10", 67.0),
        _features("fashion-mnist", "Fashion-MNIST", 89.7),
        _features("mnist", "MNIST", 98.7),
        _network("cifar10", "CIFAR-10", "cifar10", 59.2),
        _network("fashion-mnist", "Fashion-MNIST", "mnist", 86.0),
        _network("mnist", "MNIST", "mnist", 98.1),
    )
}


def chosen(names: Iterable[str]) -> dict[str, list[Cell]]:
    """The cells that names stand for, by study.

    A name is STUDY, STUDY/SPLIT, STUDY/SPLIT/EPSILON or STUDY/SPLIT/EPSILON/CONTENDER; "all" means every study.
    """
    found: dict[str, list[Cell]] = {}
    for name in names:
        study, _, key = name.partition("/")
        one_of(("all", *STUDIES), study=study)
        for one in STUDIES.values() if study == "all" else [STUDIES[study]]:
            keys = [cell for cell in one.cells() if not key or f"{cell.key}/".startswith(f"{key}/")]
            if not keys:
                raise UsageError(f"{one.name} has no condition {key!r}; its conditions are like {one.cells()[0].key!r}")
            held = found.setdefault(one.name, [])
            held += [cell for cell in keys if cell not in held]
    return found
