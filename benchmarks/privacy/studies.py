"""The studies: data, number of clients, model, contenders, and tuning budget.

A new study is one entry of `STUDIES`, or a `Study` in a file of your own: `python -m benchmarks.privacy run
FILE.py:NAME`. Unless its settings say otherwise, a study protects a client against a server that sees only sums
(zero-out, secure sum), with exact ε at δ = 1e-5. An infinite ε stands for runs without noise. Every training record
belongs to exactly one client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normec.errors import UsageError, nearest, one_of

from .contenders import ALL, CONTENDERS, RECORD_CONTENDERS, ROLES, Contender, Roles
from .tuning import TuningBudget

EPSILONS = (8.0, 4.0, 2.0, 1.0)
SPLITS = ("iid", "label")
BY_ROLE = "role"  # the split of Shakespeare's plays
NO_NOISE = math.inf  # the ε of runs without privacy
BY_HETEROGENEITY = ("iid", "dirichlet 1", "dirichlet 0.3", "dirichlet 0.1", "label")


@dataclass(frozen=True)
class Published:
    """What others report for one ε of a study.

    Attributes:
        authors: Who, with the year.
        epsilon: Their ε.
        accuracy: Their test accuracy, in percent.
        other: How their model or training differs, as a sentence; empty if a study repeats their condition.
    """

    authors: str
    epsilon: float
    accuracy: float
    other: str = ""


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
    seconds_per_round: float = 0.01  # as its cells took, with one process or GPU; for the estimate before a run
    published: tuple[Published, ...] = ()  # what others report for conditions of this study
    own: Mapping[str, Contender] = field(default_factory=dict)  # contenders of this study alone

    def __post_init__(self) -> None:
        for name in self.contenders:
            if name not in self.own and name not in ALL:
                raise UsageError(
                    f"{self.name}: {name!r} is neither a contender of the benchmark nor described in own"
                    f"{nearest(name, (*self.own, *ALL))}"
                )
        roles = {**ROLES, **dict(self.budget.roles)}
        for name, contender in self.own.items():
            for setting, values in contender.ranges.items():
                if isinstance(values, str) and values not in roles:
                    raise UsageError(
                        f"{self.name}, {name}: the range of {setting} must be two bounds, a list of choices, or a role "
                        f"({', '.join(roles)}), got {values!r}"
                    )
        if "rounds" in self.settings:
            raise UsageError(
                f"{self.name}: the number of rounds is tuned, got rounds = {self.settings['rounds']} in the settings; "
                "give the choices to the tuning budget, as in TuningBudget(..., rounds=(100, 200))"
            )

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
        """The settings that all methods share in the condition of a cell.

        A split "dirichlet 0.3" is a Dirichlet split with that concentration, and "role" is part of the data.
        """
        split, _, concentration = cell.split.partition(" ")
        divided: dict[str, Any] = {} if split == BY_ROLE else {"split": split}
        divided |= {"concentration": float(concentration)} if concentration else {}
        promised = {"private": False} if cell.epsilon == NO_NOISE else {"epsilon": cell.epsilon}
        return {**self.settings, **promised, **divided}

    def expected(self, cell: Cell) -> dict[str, Any]:
        """The entries that the record of a cell must have: its condition, and the tuning budget with its seeds.

        The ε of runs without noise is None, because JSON has no infinity.
        """
        budget = self.budget
        seeds = {"tuning_seeds": [*budget.tuning_seeds], "test_seeds": [*budget.test_seeds]}
        epsilon = None if cell.epsilon == NO_NOISE else cell.epsilon
        own = {"study": self.name, "method": cell.method, **self.settings, "epsilon": epsilon, "split": cell.split}
        return {**own, "by": budget.by, "trials": budget.trials, **seeds}


@dataclass(frozen=True)
class Condition:
    """A study, an ε and a split, in which all methods are compared."""

    study: str
    epsilon: float
    split: str

    @property
    def private(self) -> bool:
        return self.epsilon != NO_NOISE

    def __str__(self) -> str:
        return f"{self.study}, {self.split}, {shown(self.epsilon)}"


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


def shown(epsilon: float) -> str:
    """An ε as the tables name it."""
    return "no noise" if epsilon == NO_NOISE else f"ε = {epsilon:g}"


# The validation sets are large, so one tuning seed and more settings are better than two seeds and fewer settings.
_LINEAR = TuningBudget(12, (0,), (2, 3, 4))
_LONG = (
    ("steps", (0.1, 30.0)),
    ("plain_steps", (1.0, 300.0)),
    ("adam_steps", (0.01, 1.0)),
    ("server_steps", (3.0, 300.0)),
)
_RARE = replace(_LINEAR, roles=_LONG, by="area")
_IMAGES = TuningBudget(6, (0,), (2, 3, 4), roles=(("plain_steps", (0.1, 10.0)),))
_SMALL = "the model has 24,346 parameters, because the noise grows with their number; ResNet20 has eleven times as many"
_A9A = "A constant answer reaches 76.4 %"
_W8A = "The area is used because 3 % of the records are positive and a constant answer reaches 97.0 % accuracy"
_BY_GRADIENTS = tuple(name for name, contender in CONTENDERS.items() if not contender.local)
_REMEMBERING = (
    "DP-SGD, norm, momentum",
    "NormEC, forgetting",
    "DP-SGD, norm, Adam",
    "DP-SGD, norm",
    "NormEC, forgetting, momentum",
)
_FEATURES = {"model": "softmax", "features": "scattering", "augment": False}
_PHOTOGRAPHS = {**_FEATURES, "features": "mirrored scattering"}
_CLOTHES = {**_FEATURES, "features": "root scattering"}
TRAMER_BONEH = "Tramèr and Boneh (2021)"
_DE_ET_AL = Published(
    "De et al. (2022)",
    8.0,
    81.4,
    "They train a Wide-ResNet-40-4 from scratch, and average the gradients of 16 augmentations of every image before "
    "they clip: one such run takes many hours of a GPU, and every method needs several for tuning and testing",
)
_RECORDS = {"clients": 1, "unit": "record", "trust": "central", "averaging": "ema", "averaging_decay": 0.9}
_LONG_STEPS = (
    ("plain_steps", (100.0, 3000.0)),
    ("steps", (100.0, 1000.0)),
    ("adam_steps", (0.01, 0.3)),
    ("threshold", (0.05, 0.5)),
)
_SHORTER_STEPS = (*_LONG_STEPS[:1], ("steps", (30.0, 300.0)), ("adam_steps", (0.03, 1.0)), *_LONG_STEPS[3:])
# Root features are five times as long as those of MNIST: so are the gradients of records, and steps have to be shorter.
_ROOT_STEPS = (
    ("steps", (30.0, 150.0)),
    ("plain_steps", (4.0, 120.0)),
    ("adam_steps", (0.003, 0.1)),
    ("threshold", (0.25, 2.5)),
)
_NETWORK_STEPS = (("plain_steps", (3.0, 100.0)), ("steps", (0.5, 10.0)), ("threshold", (0.05, 0.5)))
_DEEPER_STEPS = (("plain_steps", (3.0, 60.0)), ("steps", (0.5, 5.0)), ("threshold", (0.05, 0.5)))
_UNIT_NORM = (("steps", (0.1, 10.0)), ("plain_steps", (1.0, 300.0)), ("adam_steps", (0.0005, 0.03)))
_TEXT = TuningBudget(6, (0,), (2, 3, 4), rounds=(100, 200), by="next_character")
_ON_TEXT = ("DP-SGD, norm", "DP-SGD, norm, momentum", "DP-SGD, norm, Adam", "NormEC", "NormEC, forgetting")
_WINDOWS = (
    "A record is a window of 80 characters; a role has at most 20, a public number, of which the last fifth is for "
    "testing. The most frequent character, a space, is 16.3 % of the text"
)
_PFL = "DP-FedAvg, as published"
# pfl-research draws 50 of 1,000 clients and adds the noise of a cohort of 1,000 out of 10⁶, scaled down by 50/1,000:
# its multiplier is 0.61615 for (2, 1e-6) after 1,500 rounds. normec's σ is that of one client's share of the noise.
_PFL_SIGMA = 0.61615 * 0.4 * (50 / 1000) / math.sqrt(1000)


def _shakespeare(model: str, clients: int, shows: str, seconds: float, *notes: str) -> Study:
    return Study(
        f"shakespeare-{model}",
        shows,
        {"data": "shakespeare", "model": model, "clients": clients},
        _TEXT,
        epsilons=(NO_NOISE, 8.0),
        splits=(BY_ROLE,),
        contenders=_ON_TEXT,
        notes=(_WINDOWS, *notes),
        seconds_per_round=seconds,
    )


def _record_level(
    name: str,
    shows: str,
    settings: Mapping[str, Any],
    roles: Roles,
    contenders: Iterable[str],
    published: float,
    seconds: float,
    *notes: str,
    rounds: tuple[int, ...] = (200, 400),
) -> Study:
    """A study beside the accuracy of Tramèr and Boneh with the same features or network.

    On CIFAR-10 it has the ε of De et al. as well, whose network is another one.
    """
    found = (Published(TRAMER_BONEH, 3.0, published), *((_DE_ET_AL,) if settings["data"] == "cifar10" else ()))
    reports = (f"{one.authors} report {one.accuracy} % at {shown(one.epsilon)}" for one in found)
    return Study(
        name,
        f"{shows}, each record protected, a trusted server",
        {**settings, **_RECORDS},
        TuningBudget(6, (0,), (2, 3, 4), rounds=rounds, roles=roles),
        epsilons=tuple(sorted((one.epsilon for one in found), reverse=True)),
        splits=("iid",),
        contenders=tuple(contenders),
        notes=(*reports, *notes),
        seconds_per_round=seconds,
        published=found,
    )


def _features(
    data: str,
    shown: str,
    published: float,
    features: Mapping[str, Any] = _FEATURES,
    roles: Roles = _LONG_STEPS,
    *notes: str,
    seconds: float = 0.01,
    rounds: tuple[int, ...] = (200, 400),
) -> Study:
    shows = f"softmax regression on {features['features']} features of {shown}"
    settings, name = {"data": data, **features}, f"{data}-records"
    return _record_level(name, shows, settings, roles, RECORD_CONTENDERS, published, seconds, *notes, rounds=rounds)


def _network(
    data: str, shown: str, model: str, published: float, roles: Roles = _NETWORK_STEPS, *notes: str, **own: Any
) -> Study:
    shows = f"the CNN of Tramèr and Boneh on {shown}, end to end"
    file = f"benchmarks/privacy/tanh_cnns.py:{model}"
    settings = {"data": data, "model": file, "augment": False, "batch_rate": 0.1, **own}
    contenders = "DP-GD, AUTO-S, momentum", "DP-GD, records clipped, momentum"
    drawn = "Each round uses each record with probability 0.1"
    seconds = 0.12 if data == "cifar10" else 0.05
    return _record_level(f"{data}-records-cnn", shows, settings, roles, contenders, published, seconds, drawn, *notes)


def _linear(data: str, clients: int, budget: TuningBudget, model: str, seconds: float, *notes: str) -> Study:
    settings = {"data": data, "model": model, "clients": clients}
    kind = "logistic regression" if model == "logistic" else "softmax regression"
    shows = f"{kind} on {data}, {clients:,} clients"
    return Study(f"{data}-{clients}", shows, settings, budget, notes=notes, seconds_per_round=seconds)


STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        _linear("a9a", 100, _LINEAR, "logistic", 0.004, _A9A),
        _linear("a9a", 1000, _LINEAR, "logistic", 0.006, _A9A),
        _linear("w8a", 100, _RARE, "logistic", 0.01, _W8A),
        _linear("w8a", 1000, _RARE, "logistic", 0.017, _W8A),
        _linear("digits", 100, TuningBudget(15), "softmax", 0.003),
        Study(
            "digits-10-no-noise",
            "softmax regression on digits without noise, 10 clients from alike to one class each",
            {"data": "digits", "model": "softmax", "clients": 10},
            TuningBudget(8, (0,), (2, 3, 4), rounds=(100, 200)),
            epsilons=(NO_NOISE,),
            splits=BY_HETEROGENEITY,
            notes=(
                "Without noise nothing is private: the messages are bounded as in private runs, and the study shows "
                "what the bound alone costs",
                "Dirichlet 0.3 divides each class among the clients in proportions from a Dirichlet distribution with "
                "concentration 0.3",
            ),
            seconds_per_round=0.0015,
        ),
        Study(
            "fashion-mnist-1000",
            "a small CNN on Fashion-MNIST, 1,000 clients",
            {"data": "fashion-mnist", "model": "cnn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            contenders=_BY_GRADIENTS,
            notes=("Each client has 60 images of its own",),
            seconds_per_round=0.018,
        ),
        Study(
            "cifar10-1000",
            "a small CNN with GroupNorm on CIFAR-10, 1,000 clients",
            {"data": "cifar10", "model": "cnn-gn", "clients": 1000, "precision": "bf16"},
            _IMAGES,
            notes=("Each client has 50 images of its own; " + _SMALL,),
            seconds_per_round=0.025,
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
            seconds_per_round=0.027,
        ),
        Study(
            "cifar10-features-10000",
            "softmax regression on scattering features of CIFAR-10, 10,000 clients",
            {"data": "cifar10", **_FEATURES, "clients": 10000},
            TuningBudget(6, (0,), (2, 3, 4), rounds=(100, 200), roles=_UNIT_NORM),
            epsilons=(8.0,),
            contenders=("DP-SGD, norm, momentum", "NormEC, forgetting", "DP-SGD, norm"),
            notes=("Each client has 5 images of its own; nothing about the features is learned",),
            seconds_per_round=0.14,
        ),
        Study(
            "cifar10-pfl",
            "DP-FedAvg on CIFAR-10 in the set-up of pfl-research, with its noise, 1,000 clients",
            {
                "data": "cifar10",
                "model": "benchmarks/privacy/pfl_cnn.py:simple_cnn",
                "clients": 1000,
                "augment": False,
                "trust": "central",
                "delta": 1e-6,
                "sample_rate": 0.05,
                "batch_size": 10,
            },
            TuningBudget(1, (0,), (2, 3, 4), rounds=(1500,)),
            epsilons=(2.0,),
            splits=("iid",),
            contenders=(_PFL,),
            notes=(
                "About 50 clients take part in a round, with one local epoch. Nothing is tuned: all settings are those "
                "of its benchmarks/image_classification, without dropout",
                "Its ε of 2 at δ = 1e-6 is that of a cohort of 1,000 clients out of 10⁶; each of the 1,000 clients "
                "that there are is drawn 50 times as often, and the noise is a twentieth",
            ),
            seconds_per_round=0.13,
            own={
                _PFL: Contender(
                    "fedavg",
                    "local",
                    {"lr": [20.0]},  # the mean of all 1,000 clients is a twentieth of that of the 50
                    {"tau": 0.4, "local_steps": 5, "local_lr": 0.1, "sigma": _PFL_SIGMA, "epsilon": None},
                )
            },
        ),
        Study(
            "cifar10-pfl-true",
            "a small CNN with GroupNorm on CIFAR-10, 1,000 clients, for a true (2, 1e-6)",
            {"data": "cifar10", "model": "cnn-gn", "clients": 1000, "delta": 1e-6, "precision": "bf16"},
            replace(_IMAGES, roles=(*_IMAGES.roles, ("adam_steps", (0.0005, 0.03)))),
            epsilons=(2.0,),
            splits=("iid",),
            contenders=(*_REMEMBERING[:4], "DP-FedAvg"),
            notes=("All clients take part in every round; " + _SMALL,),
        ),
        _shakespeare(
            "gpt",
            634,
            "a GPT of 113,792 parameters on Shakespeare's plays, next character, 634 roles as clients",
            0.15,
        ),
        _shakespeare(
            "gpt-lora",
            320,
            "LoRA adapters of rank 4 (8,192 parameters) of a GPT of 820,736 parameters on Shakespeare's plays, next "
            "character, 320 roles as clients",
            0.21,
            "The GPT is first trained without privacy on the roles of every second play in alphabetical order, which "
            "count as public; the clients are the roles of the others",
        ),
        _features(
            "cifar10",
            "CIFAR-10",
            67.0,
            _PHOTOGRAPHS,
            _SHORTER_STEPS,
            "Channels are scaled by statistics of synthetic images, and the features of an image and of its mirror "
            "image are averaged. These features and the ranges were chosen on validation data",
            seconds=0.02,
        ),
        _features(
            "fashion-mnist",
            "Fashion-MNIST",
            89.7,
            _CLOTHES,
            _ROOT_STEPS,
            "The features are main components, in synthetic images, of the square roots of the coefficients. These "
            "features and the ranges were chosen on validation data",
            seconds=0.5,
            rounds=(100, 200),
        ),
        _features("mnist", "MNIST", 98.7),
        _network(
            "cifar10",
            "CIFAR-10",
            "cifar10",
            59.2,
            _DEEPER_STEPS,
            "The ranges were chosen on validation data",
            precision="tf32",
        ),
        _network("fashion-mnist", "Fashion-MNIST", "mnist", 86.0),
        _network("mnist", "MNIST", "mnist", 98.1),
    )
}


def chosen(names: Iterable[str], studies: Mapping[str, Study] = STUDIES) -> dict[str, list[Cell]]:
    """The cells that names stand for, by study.

    A name is STUDY, STUDY/SPLIT, STUDY/SPLIT/EPSILON or STUDY/SPLIT/EPSILON/CONTENDER; "all" means every study.
    """
    found: dict[str, list[Cell]] = {}
    for name in names:
        study, _, key = name.partition("/")
        one_of(("all", *studies), study=study)
        for one in studies.values() if study == "all" else [studies[study]]:
            keys = [cell for cell in one.cells() if not key or f"{cell.key}/".startswith(f"{key}/")]
            if not keys:
                raise UsageError(f"{one.name} has no condition {key!r}; its conditions are like {one.cells()[0].key!r}")
            held = found.setdefault(one.name, [])
            held += [cell for cell in keys if cell not in held]
    return found
