"""The base class of trackers: the beginning of a run, its rows, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..storage.history import NOT_COVERED, Row, uncovered
from ..training.callbacks import Callback

if TYPE_CHECKING:
    from ..training.run import Run


class Tracker(Callback):
    """A callback that hands rows to `log` once the run has begun. As a context manager, it also records errors.

    Columns of a private run that were measured without noise go under "not covered by the guarantee/". Of an error that
    ends a private run only its kind is recorded, because its text may show records.

    Args:
        settings: The settings of the run, which the tracker shows.

    Example:
        >>> class Prints(Tracker):
        ...     def start(self, first_round):
        ...         print("from round", first_round)
        ...     def log(self, values, round):
        ...         print(round, values)
        >>> tracker = Prints()
        >>> tracker.begin(0, 10)
        from round 0
        >>> tracker.row({"round": 0, "loss": 2.0})
        0 {'loss': 2.0}
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = {key: value for key, value in (settings or {}).items() if value is not None}
        self._waiting: list[Row] = []
        self._begun = self._ended = False
        self._public = False  # whether a row without an ε has shown that the run is not private

    def start(self, first_round: int) -> None:
        """Open a new run of the tracker, or the one to continue; rows from `first_round` on will follow."""
        raise NotImplementedError

    def log(self, values: dict[str, float], round: int) -> None:
        """Record the values of a row, by column."""
        raise NotImplementedError

    def finish(self, status: str, error: str | None) -> None:
        """Close the run of the tracker.

        Args:
            status: "finished", also if a callback or a spent budget ended the run; "interrupted" or "failed".
            error: Why the run failed; None if it did not.
        """
        raise NotImplementedError

    def begin(self, first_round: int, rounds: int) -> None:  # noqa: ARG002
        self.start(first_round)
        self._begun = True
        for row in self._waiting:
            self.row(row)

    def row(self, row: Row) -> None:
        if not self._begun:
            self._waiting.append(row)
            return
        self._public |= row.get("epsilon") is None
        unprotected = uncovered(row)
        values = {
            f"{NOT_COVERED}/{key}" if key in unprotected else key: float(value)
            for key, value in row.items()
            if key != "round" and value is not None
        }
        self.log(values, row["round"])

    def end(self, run: Run) -> None:
        self._end("interrupted" if run.stopped == "interrupted" else "finished", None)

    def _end(self, status: str, error: str | None) -> None:
        if self._begun and not self._ended:
            self._ended = True
            self.finish(status, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = str(error) if self._public or kind is None else kind.__name__
        self._end("interrupted" if kind is KeyboardInterrupt else "failed", reason if error is not None else None)
