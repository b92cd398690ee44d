"""The metrics by which runs are compared, each declared once: in `METRICS`.

The table of `normec results`, the pages of sweeps and comparisons, and the columns that `--by` takes follow from the
declaration. A metric is a column of the last row of the history, or a value of the whole run in its summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..storage.history import UNNOISED


@dataclass(frozen=True)
class Metric:
    """A number by which runs are compared.

    Attributes:
        column: Its name in files, tables and `--by`.
        label: Its name on pages, with its unit.
        heading: Its heading in printed tables.
        better: Whether smaller or larger values are better.
        scale: The axis on which pages draw it.
        percent: Whether it is a share that is shown in percent.
        decides: Whether settings can be chosen by it.
        on_test: Whether it is measured on test data, which choose settings only on request.
        usual: Whether printed tables and the page of a comparison show it without being asked.
    """

    column: str
    label: str
    heading: str
    better: Literal["min", "max"] = "min"
    scale: Literal["linear", "log"] = "log"
    percent: bool = False
    decides: bool = False
    on_test: bool = False
    usual: bool = False

    @property
    def title(self) -> str:
        """The label without the unit of a share."""
        return self.label.removesuffix(", %")

    @property
    def unnoised(self) -> bool:
        """Whether it is a function of the clients' data without noise, which no guarantee covers."""
        return self.column.removeprefix("smallest_") in UNNOISED


def _number(column: str, label: str, heading: str = "", *, on_test: bool = False, usual: bool = False) -> Metric:
    """A number of which less is better."""
    return Metric(column, label, heading or label, decides=True, on_test=on_test, usual=usual)


def _accuracy(column: str, label: str, heading: str = "", *, on_test: bool = False, usual: bool = True) -> Metric:
    """A share of records of which more is better."""
    return Metric(column, f"{label}, %", heading or label, "max", "linear", True, True, on_test, usual)


METRICS = (
    _number("loss", "training loss", "loss", usual=True),
    _number("grad_norm", "gradient norm", "‖∇f‖", usual=True),
    _number("smallest_grad_norm", "smallest gradient norm", "min ‖∇f‖"),
    _number("memory_error", "memory error"),
    Metric("message_norm", "message norm", "message norm"),
    Metric("disagreement", "client disagreement", "disagreement"),
    _number("validation_loss", "validation loss"),
    _accuracy("validation_accuracy", "validation accuracy"),
    _accuracy("validation_accuracy_mean_over_clients", "validation accuracy, mean over clients"),
    _number("test_loss", "test loss", on_test=True),
    _accuracy("accuracy", "test accuracy", "accuracy", on_test=True),
    _accuracy(
        "accuracy_mean_over_clients", "test accuracy, mean over clients", "accuracy, mean over clients", on_test=True
    ),
    _accuracy("best_accuracy", "best test accuracy", "best accuracy", on_test=True, usual=False),
    Metric("epsilon", "ε spent", "ε", scale="linear", usual=True),
    Metric("bytes", "sent by a client, bytes", "bytes", scale="linear"),
    Metric("seconds", "time, s", "s", scale="linear", usual=True),
)
BY_COLUMN: Mapping[str, Metric] = {metric.column: metric for metric in METRICS}
# As pages show them: accuracies come first, and of these the ones on test data.
IN_ORDER = sorted(METRICS, key=lambda metric: (not metric.percent, metric.percent and not metric.on_test))
_UNIVERSAL = ("round", "messages", *UNNOISED)  # further columns of all runs


def values_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every metric of a run, by column; None where it was not measured."""
    final = summary["final"]
    held = {
        **final,
        **{name: summary[name] for name in ("best_accuracy", "smallest_grad_norm") if name in summary},
        "epsilon": (summary.get("privacy") or final).get("epsilon"),
        "seconds": (summary.get("timings") or {}).get("total"),
    }
    return {name: held.get(name) for name in BY_COLUMN}


def own_metrics(final: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the user's own in a row of the history, and those of test sets by name."""
    return {name: value for name, value in final.items() if name not in BY_COLUMN and name not in _UNIVERSAL}
