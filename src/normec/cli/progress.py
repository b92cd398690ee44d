"""The progress of a run on stderr: a live bar in a terminal, and plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ..privacy.display import shown_epsilon
from ..storage.history import NOT_COVERED, Row, uncovered
from ..training.callbacks import Callback
from .output import printable

if TYPE_CHECKING:
    from ..training.run import Run


class ProgressDisplay(Callback):
    """A display of progress, which shows nothing here; `close` removes it, also if there is no `Run` for `end`."""

    def close(self) -> None:
        """Remove the display."""

    def end(self, run: Run) -> None:  # noqa: ARG002
        self.close()


def progress_display(label: str, quiet: bool = False) -> ProgressDisplay:
    """Return the display for this stderr."""
    if quiet:
        return ProgressDisplay()
    return Bar(label) if sys.stderr.isatty() else Lines(label)


class Bar(ProgressDisplay):
    """A bar with loss, accuracy and the time left."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[seen]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(printable(label), total=None, seen="")
        self._seen: Row = {}

    def begin(self, first_round: int, rounds: int) -> None:
        self._progress.update(self._task, total=rounds, completed=first_round)
        self._progress.start()

    def round(self, round: int) -> None:
        self._progress.update(self._task, completed=round)

    def row(self, row: Row) -> None:
        self._seen |= row
        self._progress.update(self._task, seen=describe(self._seen))

    def close(self) -> None:
        self._progress.stop()


class Lines(ProgressDisplay):
    """Prints a line after each evaluation on the test set, at most every two seconds, and for the last round."""

    def __init__(self, label: str) -> None:
        self._label, self._last = label, -2.0
        self._rounds: int | None = None

    def begin(self, first_round: int, rounds: int) -> None:
        self._first, self._rounds, self._started = first_round, rounds, time.monotonic()

    def row(self, row: Row) -> None:
        now, k = time.monotonic(), row["round"]
        if self._rounds is None:  # nobody has taken part yet: `begin` waits for the first gradients
            return
        if k != self._rounds and ("test_loss" not in row or now - self._last < 2):
            return
        self._last = now
        done = k - self._first
        left = (
            f"  {(now - self._started) / done * (self._rounds - k):.0f} s left" if done > 0 and k < self._rounds else ""
        )
        print(f"{printable(self._label)}  round {k}/{self._rounds}  {describe(row)}{left}", file=sys.stderr, flush=True)


def describe(row: Row) -> str:
    parts = []
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row.get("grad_norm") is not None:
        parts.append(f"‖∇f‖ {row['grad_norm']:.2e}")
    if parts and uncovered(row):
        parts.append(f"({NOT_COVERED})")
    if row.get("epsilon") is not None:
        parts.append(f"ε {shown_epsilon(row['epsilon'])}")
    if row.get("accuracy") is not None:
        parts.append(f"accuracy {100 * row['accuracy']:.1f} %")
    return "  ".join(parts)
