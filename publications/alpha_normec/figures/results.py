"""The runs of a figure by their place in the grids, and what a figure reads off a run: in percent, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normec.experiments import tuning
from normec.experiments.grid import Cell
from normec.experiments.sweep import Outcome

from . import protocol as protocols
from .arms import Arm, cell
from .protocol import Protocol

Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A run round by round: training loss as its mean over a round, accuracy at the round's end."""

    rounds: list[int]
    loss: list[float | None]
    accuracy: list[float | None]


class Results:
    """Outcomes of a protocol's runs."""

    def __init__(self, protocol: Protocol, outcomes: Iterable[Outcome]) -> None:
        self.protocol = protocol
        self._held = {outcome.cell.config.digest(): outcome for outcome in outcomes}

    def at(self, arm: Arm, beta: float, lr: float, alpha: float | None = None) -> Outcome:
        """The run at a point of the grids."""
        return self._held[cell(self.protocol, arm, beta, lr, alpha).config.digest()]

    def of(self, cells: Iterable[Cell]) -> list[Outcome]:
        """The runs of these cells."""
        return [self._held[one.config.digest()] for one in cells]

    def best(self, arm: Arm, beta: float, lrs: Sequence[float], alpha: float | None = None) -> Outcome | None:
        """The run with the best final accuracy on the share held out; a single step size needs no choice."""
        tried = {lr: self.at(arm, beta, lr, alpha) for lr in lrs}
        if len(tried) == 1:
            return tried[lrs[0]]
        found = {lr: [tuning.value(outcome.summary, tuning.DEFAULT)] for lr, outcome in tried.items()}
        chosen = tuning.best(found, tuning.DEFAULT)
        return tried[chosen] if chosen is not None else None

    def highest(self, outcome: Outcome | None) -> float | None:
        """The highest test accuracy along a run, also of one that diverged later."""
        found = outcome.history[self.protocol.column] if outcome is not None else []
        return 100 * max(found) if found else None

    def final(self, outcome: Outcome | None, column: str | None = None) -> float | None:
        """The accuracy at the end of a run; None if it diverged."""
        if outcome is None or outcome.status not in tuning.RESULTS:
            return None
        return 100 * float(outcome.summary["final"][column or self.protocol.column])

    def curve(self, outcome: Outcome) -> Curve:
        """The run in communication rounds; the losses in a round are those before each of its steps."""
        steps, history = protocols.extent(self.protocol).steps, outcome.history
        losses: dict[int, list[float]] = {}
        for k, loss in zip(history.rounds("loss"), history["loss"], strict=True):
            losses.setdefault(k // steps + 1, []).append(loss)
        column = self.protocol.column
        accuracy = {k // steps: 100 * value for k, value in zip(history.rounds(column), history[column], strict=True)}
        rounds = sorted(accuracy)
        means = {k: statistics.fmean(values) for k, values in losses.items()}
        return Curve(rounds, [means.get(k) for k in rounds], [accuracy[k] for k in rounds])

    def epsilons(self, outcomes: Iterable[Outcome]) -> list[float]:
        """The exact ε of those runs that came to their end, from the smallest; none without noise."""
        found = [outcome.summary["privacy"] for outcome in outcomes if outcome.status in tuning.RESULTS]
        return sorted(privacy["epsilon"] for privacy in found if privacy is not None)


def point(outcome: Outcome | None) -> Row:
    """Where a run stands in the grids, and its name; all None where there is none."""
    settings = outcome.cell.settings if outcome is not None else {}
    digest = outcome.cell.config.digest() if outcome is not None else None
    return {**{key: settings.get(key) for key in ("method", "alpha", "beta", "lr")}, "digest": digest}
