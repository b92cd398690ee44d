"""The problems on which suggestions are checked, with the search that each is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.privacy.contenders import CONTENDERS, Contender
from benchmarks.privacy.tuning import TuningBudget

BUDGET = TuningBudget(12, (0,), (2, 3, 4, 5, 6))
RARE = replace(BUDGET, roles=(("steps", (0.1, 30.0)),), by="area")
# Where records are protected, tau clips the mean of clipped records, and 1 clips nothing.
_RECORDS = "DP-GD, records clipped"
_LONGER = "DP-GD, records clipped, longer steps"
PATIENTS = Path(__file__).parent / "patients"  # the table of docs/tutorials/table.md
SEARCHED: Mapping[str, Contender] = {
    **{name: CONTENDERS[name] for name in ("NormEC, forgetting", "DP-Clip21", "DP-SGD, norm", "DP-SGD, clip")},
    _RECORDS: Contender("dpsgd-clip", "plain", {"lr": (0.01, 2.0)}, {"tau": 1.0}),
    _LONGER: Contender("dpsgd-clip", "plain", {"lr": (0.05, 5.0)}, {"tau": 1.0}),
}


@dataclass(frozen=True)
class Condition:
    """A problem with a privacy target.

    Attributes:
        name: Its name in tables.
        shared: The settings of the problem and of the privacy statement.
        search: The method with the ranges of its search, a name in `SEARCHED`.
        fitted: Whether the constants of the rule were chosen with runs on this problem.
        budget: The tuning budget.
    """

    name: str
    shared: Mapping[str, Any] = field(hash=False)
    search: str = "NormEC, forgetting"
    fitted: bool = False
    budget: TuningBudget = BUDGET

    @property
    def contender(self) -> Contender:
        """The method and the ranges of its search."""
        return SEARCHED[self.search]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.search}"


def _linear(data: str, clients: int, epsilon: float, **more: Any) -> dict[str, Any]:
    return {"data": data, "clients": clients, "epsilon": epsilon, **more}


def _record(data: str, clients: int, epsilon: float, **more: Any) -> dict[str, Any]:
    return _linear(data, clients, epsilon, unit="record", **more)


def _network(epsilon: float) -> Iterator[Condition]:
    """Networks with one hidden layer, whose records are protected."""
    e = f"{epsilon:g}"
    for data, clients in (("digits", 10), ("breast_cancer", 5), ("wine", 4)):
        name = f"{data}, MLP, records of {clients} clients, ε = {e}"
        yield Condition(name, _record(data, clients, epsilon, model="mlp"), _LONGER, True)
    name = f"patients, MLP, records of 3 hospitals, local trust, ε = {e}"
    yield Condition(name, _patients(epsilon, trust="local"), _LONGER, True)


def _patients(epsilon: float, **more: Any) -> dict[str, Any]:
    files = {"data": str(PATIENTS / "patients.csv"), "data_schema": str(PATIENTS / "patients.toml")}
    return {**files, "split": "centre", "model": "mlp", "hidden": 16, "unit": "record", "epsilon": epsilon, **more}


def _linear_patients(epsilon: float) -> dict[str, Any]:
    settings = _patients(epsilon, trust="local", model="softmax")
    return {name: value for name, value in settings.items() if name != "hidden"}


_DIGITS = _linear("digits", 100, 2.0)
_MUSHROOMS = _linear("mushrooms", 300, 2.0)
_CLIP, _NORM, _CLIP21 = "DP-SGD, clip", "DP-SGD, norm", "DP-Clip21"

CONDITIONS: Mapping[str, Condition] = {
    one.key: one
    for one in (
        Condition("digits, 100 clients, ε = 8", _linear("digits", 100, 8.0), fitted=True),
        Condition("digits, 100 clients, ε = 1", _linear("digits", 100, 1.0), fitted=True),
        Condition("digits, 100 clients by label, ε = 8", _linear("digits", 100, 8.0, split="label"), fitted=True),
        Condition("a9a, 1,000 clients, ε = 2", _linear("a9a", 1000, 2.0, model="logistic"), fitted=True),
        Condition(
            "a9a, 1,000 clients by label, ε = 4",
            _linear("a9a", 1000, 4.0, model="logistic", split="label"),
            fitted=True,
        ),
        Condition("phishing, 100 clients, ε = 8", _linear("phishing", 100, 8.0), fitted=True),
        Condition("digits, MLP, 200 clients, ε = 4", _linear("digits", 200, 4.0, model="mlp"), fitted=True),
        Condition("digits, 100 clients, local trust, ε = 8", _linear("digits", 100, 8.0, trust="local")),
        Condition("a9a, 300 clients, replace, ε = 2", _linear("a9a", 300, 2.0, model="logistic", relation="replace")),
        Condition("mushrooms, 300 clients, ε = 2", _MUSHROOMS),
        Condition("breast_cancer, 100 clients, ε = 4", _linear("breast_cancer", 100, 4.0)),
        Condition("wine, 50 clients, ε = 8", _linear("wine", 50, 8.0)),
        Condition("w8a, 1,000 clients, ε = 4", _linear("w8a", 1000, 4.0, model="logistic"), fitted=True, budget=RARE),
        Condition("w8a, 300 clients, ε = 8", _linear("w8a", 300, 8.0, model="logistic"), budget=RARE),
        Condition("digits, 100 clients, ε = 2", _DIGITS, _NORM, fitted=True),
        Condition("digits, 100 clients, ε = 2", _DIGITS, _CLIP, fitted=True),
        Condition("digits, 100 clients, ε = 2", _DIGITS, _CLIP21, fitted=True),
        Condition("mushrooms, 300 clients, ε = 2", _MUSHROOMS, _CLIP),
        Condition("digits, records of 10 clients, ε = 1", _record("digits", 10, 1.0), _RECORDS, True),
        Condition("breast_cancer, records of 5 clients, ε = 1", _record("breast_cancer", 5, 1.0), _RECORDS, True),
        Condition("wine, records of 4 clients, ε = 2", _record("wine", 4, 2.0), _RECORDS, True),
        *(
            Condition(f"patients, records of 3 hospitals, local trust, ε = {e:g}", _linear_patients(e), _LONGER, True)
            for e in (1.0, 3.0)
        ),
        Condition(
            "heart-disease, records of 4 hospitals, ε = 1",
            {"data": "heart-disease", "epsilon": 1.0, "unit": "record", "trust": "local"},
            _RECORDS,
        ),
        *(condition for epsilon in (1.0, 3.0, 8.0) for condition in _network(epsilon)),
        Condition(
            "digits, MLP of 16 units, records of 5 clients, ε = 2",
            _record("digits", 5, 2.0, model="mlp", hidden=16),
            _LONGER,
        ),
        Condition("patients, MLP, records of 3 hospitals, ε = 0.5", _patients(0.5), _LONGER),
        Condition(
            "breast_cancer, MLP, records of 10 clients, local trust, ε = 4",
            _record("breast_cancer", 10, 4.0, model="mlp", trust="local"),
            _LONGER,
        ),
    )
}
