"""The user's metrics of test and validation sets: functions of all outputs, or objects that see batch after batch."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .batch_form import Tree, joined, leaves_of


@runtime_checkable
class StreamingMetric(Protocol):
    """A metric that sees one batch after the other, as those of torchmetrics do."""

    def update(self, outputs: Any, targets: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


Metric = Callable[[Any, Any], Any] | StreamingMetric


def checked_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return copies of the metrics by name; raises `UsageError` for a wrong name or object."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(f'metrics must be a dict of metrics by name, as {{"f1": f1}}, got {type(metrics).__name__}')
    for name, metric in metrics.items():
        check_column_name("metric", name)
        if isinstance(metric, type) or not (callable(metric) or isinstance(metric, StreamingMetric)):
            raise UsageError(
                f"the metric {name!r} must be a function of outputs and targets, or an object with update, compute and "
                f"reset, got {metric!r}"
            )
    return {name: copy.deepcopy(metric) for name, metric in metrics.items()}


def check_column_name(what: str, name: object) -> None:
    """Refuse a name that cannot be part of a column's name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise UsageError(f"a {what} needs a name of letters, digits and _, got {name!r}")


class SetMetrics:
    """The values of the metrics on one set of records, or on several sets together."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._streaming = {name: copy.deepcopy(m) for name, m in metrics.items() if isinstance(m, StreamingMetric)}
        self._functions = {name: m for name, m in metrics.items() if not isinstance(m, StreamingMetric)}
        self._seen: list[tuple[Tree, Tree]] = []
        for metric in self._streaming.values():
            metric.reset()

    def add(self, outputs: Tree, targets: Tree) -> None:
        """Add one batch."""
        for metric in self._streaming.values():
            if hasattr(metric, "to"):  # a torchmetrics object keeps its sums on a device
                metric.to(leaves_of(targets)[0].device)
            metric.update(outputs, targets)
        if self._functions:
            self._seen.append((tree_map(_on_host, outputs), tree_map(_on_host, targets)))

    def read(self) -> dict[str, float]:
        """Return the values by name; a value that is not a finite number is left out."""
        found: dict[str, float] = {}
        for name, metric in self._streaming.items():
            found |= _numbers(name, metric.compute())
        if self._functions and self._seen:
            outputs, targets = (joined(parts) for parts in zip(*self._seen, strict=True))
            for name, function in self._functions.items():
                found |= _numbers(name, function(outputs, targets))
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value as columns: one number, or several by name."""
    if isinstance(value, Mapping):
        return {
            column: number for key, one in value.items() for column, number in _numbers(f"{name}_{key}", one).items()
        }
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"the metric {name!r} must be one number, or a dict of numbers, got {type(value).__name__}"
            f"{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''}"
        ) from None


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
