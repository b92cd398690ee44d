"""Ways to watch a run: every method does nothing here; override what you need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.history import Row

if TYPE_CHECKING:
    from .run import Run


class Callback:
    """Watches a run and never changes its numbers; override what you need.

    Example:
        >>> class Rounds(Callback):
        ...     def round(self, round):
        ...         print(f"{round} rounds are done")
        >>> Rounds().round(3)
        3 rounds are done
    """

    def begin(self, first_round: int, rounds: int) -> None:
        """The first round's gradients are finite; the run's folder is taken, and empty if the run is new."""

    def round(self, round: int) -> None:
        """A round has ended: `round` of them are done."""

    def row(self, row: Row) -> None:
        """A row was added to the history."""

    def end(self, run: Run) -> None:
        """The run is over, finished or interrupted."""
