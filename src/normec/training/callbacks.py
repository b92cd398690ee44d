"""Callbacks, which follow a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.history import Row

if TYPE_CHECKING:
    from .run import Run


class Callback:
    """Follows a run without changing its numbers. All methods do nothing; override those that you need.

    Example:
        >>> class Rounds(Callback):
        ...     def round(self, round):
        ...         print(f"{round} rounds are done")
        >>> Rounds().round(3)
        3 rounds are done
    """

    def begin(self, first_round: int, rounds: int) -> None:
        """Called when the first gradients are finite and the run's folder is locked; a new run's folder is empty."""

    def round(self, round: int) -> None:
        """Called after each round; `round` rounds are done."""

    def row(self, row: Row) -> None:
        """Called when a row was added to the history."""

    def end(self, run: Run) -> None:
        """Called at the end of the run, whether it is finished or interrupted."""
