"""Callbacks, which follow a run and may stop it; early stopping is one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from ..algorithms.method import Method
from ..errors import UsageError, at_least, non_negative, one_of
from ..gradients.loop import state_of_objective
from ..gradients.restored import UserState, look_up_again
from ..problems.objective import Buffers, Objective
from ..problems.problem import Problem
from ..sampling.random_streams import derive_seed, own_numbers
from ..storage.history import NOT_COVERED, UNNOISED, History, Row

if TYPE_CHECKING:
    from .run import Run, State


@contextmanager
def undone_after(problem: Objective, needed: bool, method: object = None) -> Iterator[None]:
    """Undo at the end, if that is needed, what the code of a problem, and of a method, has kept in the meantime."""
    if not needed:
        yield
        return
    if isinstance(problem, Problem):
        look_up_again(problem)
    with state_of_objective(problem).restored(), UserState(*_parts(method)).restored():
        yield


def own_numbers_of(
    callbacks: Sequence[Callback], private: bool, seed: int, function: str, round: int
) -> AbstractContextManager[None]:
    """Return the context in which a function of the callbacks of a run is called.

    In a private run, what callbacks draw, and may do with it, must not depend on how many numbers the last client has
    drawn.
    """
    if not private or not callbacks:
        return nullcontext()
    return own_numbers(derive_seed(seed, "callbacks", function, round), often=True)


def _parts(method: object) -> Iterator[object]:
    """Yield a method, and the operators and methods in it."""
    if isinstance(method, Method):
        yield method
        for value in getattr(method, "__dict__", {}).values():
            yield from _parts(value) if isinstance(value, Method) else [value] if callable(value) else ()


class RunInProgress:
    """A run as its callbacks see it: the model, the history, an evaluation, and a way to stop.

    Everything here is a function of what the server knows, so a private run shows no more than its guarantee covers,
    plus test and validation data.

    Args:
        problem: The problem that is minimised.
        state: The state of the run, which the rounds change.
        history: The rows so far.
        rounds: The number of rounds that are planned.
        evaluate_every: The number of rounds between two evaluations, after the first ones.
        private: Whether the run is private.
        seed: The seed of models that draw random numbers during evaluation.
        buffers: Returns the buffers of all clients; raises `UsageError` if this process does not have them.
    """

    def __init__(
        self,
        problem: Objective,
        state: State,
        history: History,
        rounds: int,
        evaluate_every: int,
        private: bool,
        seed: int,
        buffers: Callable[[], Buffers],
    ) -> None:
        self._problem, self._state, self._seed, self._buffers = problem, state, seed, buffers
        self.history, self.rounds, self.evaluate_every, self.private = history, rounds, evaluate_every, private
        self.reason: str | None = None

    @property
    def round(self) -> int:
        """The number of rounds that are done."""
        return self._state.round

    @property
    def x(self) -> Tensor:
        """A copy of the current model as a vector; of the average, where iterates are averaged."""
        return self._state.result.clone()

    @property
    def model(self) -> nn.Module | None:
        """A copy of the current model, ready for use; None for a problem of plain functions."""
        return self._problem.model_at(self._state.result, self._buffers())

    @property
    def epsilon(self) -> float | None:
        """The ε of the last row of history; None without privacy, or before the first row."""
        spent = self.history["epsilon"]
        return spent[-1] if spent else None

    def evaluate(self) -> dict[str, float]:
        """Return the results of the current model on the test and validation sets, as a row of history has them."""
        numbers = own_numbers(derive_seed(self._seed, "evaluation", self.round))
        with undone_after(self._problem, self.private), numbers:
            return self._problem.evaluate(self._state.result, self._buffers())

    def stop(self, reason: str) -> None:
        """End the run after the current round, with a last row of history and a checkpoint.

        Args:
            reason: Why, for `run.stopped` and the summary.
        """
        self.reason = self.reason or reason


class Callback:
    """Follows a run without changing its numbers; it may stop the run. All methods do nothing; override some.

    `self.run` is the run in progress (`RunInProgress`) from `begin` to `end`.

    Example:
        >>> class Enough(Callback):
        ...     def row(self, row):
        ...         if row.get("accuracy", 0) > 0.9:
        ...             self.run.stop("the accuracy is above 90 %")
    """

    run: RunInProgress

    def begin(self, first_round: int, rounds: int) -> None:
        """Called when the first gradients are finite and the run's folder is locked.

        The folder of a new run then holds config.toml and nothing else of the run.

        Args:
            first_round: The number of rounds that are done; 0 in a new run.
            rounds: The number of rounds that are planned.
        """

    def round(self, round: int) -> None:
        """Called after each round; `round` rounds are done."""

    def row(self, row: Row) -> None:
        """Called when a row was added to the history."""

    def end(self, run: Run) -> None:
        """Called at the end of the run, whether it is finished or interrupted."""


class EarlyStopping(Callback):
    """Stops a run when a result on validation data has not improved for some evaluations.

    The decision follows from the history alone, so a run that is started again stops at the same round. The ledger
    pays for the rounds that were made. The ε of a private run is that of all planned rounds nevertheless, because the
    number of rounds depends on what is released. The validation records decide about the number of rounds, and no noise
    covers them.

    Args:
        column: A column of the history, such as "validation_loss", "validation_accuracy" or a metric of your own.
        patience: The number of evaluations without an improvement after which the run stops. The evaluations between
            the regular ones, which follow each other closely in the first rounds, do not count.
        min_delta: The least change that counts as an improvement.
        mode: Whether a "min" or a "max" is sought (default: "max" for an accuracy, "min" for a loss).

    Raises:
        UsageError: An argument is wrong, the run does not measure the column, or the column is computed from protected
            data without noise.

    Example:
        >>> EarlyStopping("validation_accuracy", patience=3).mode
        'max'
    """

    def __init__(
        self,
        column: str = "validation_loss",
        *,
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        at_least(1, patience=patience)
        non_negative(min_delta=min_delta)
        if mode is None and not column.endswith(("loss", "accuracy", "accuracy_mean_over_clients")):
            raise UsageError(f"mode must be 'min' or 'max' for the column {column!r}, got None; give mode=…")
        self.column, self.patience, self.min_delta = column, patience, min_delta
        self.mode = mode or ("min" if column.endswith("loss") else "max")
        one_of(("min", "max"), mode=self.mode)

    def begin(self, first_round: int, rounds: int) -> None:  # noqa: ARG002
        """Check that the run measures the column, and that a private run may be stopped by it."""
        if self.run.private and self.column in UNNOISED:
            raise UsageError(
                f"the column {self.column!r} is computed from the clients' data without noise, and is {NOT_COVERED}; "
                "stop by a result on validation data"
            )
        if self.column not in UNNOISED and not self.run.history[self.column]:
            measured = self.run.evaluate()
            if self.column not in measured:
                others = f", or a column among {', '.join(measured)}" if measured else ""
                raise UsageError(
                    f"the run does not measure {self.column!r}; give validation data to the problem{others}"
                )
        self._decide()

    def row(self, row: Row) -> None:
        """Stop the run if the new row is one too many without an improvement."""
        if row.get(self.column) is not None:
            self._decide()

    def _decide(self) -> None:
        values, rounds = self.run.history[self.column], self.run.history.rounds(self.column)
        best, waited = None, 0
        for position, value in enumerate(values):
            gain = 0.0 if best is None else (values[best] - value) * (1 if self.mode == "min" else -1)
            if best is None or gain > self.min_delta:
                best, waited = position, 0
            elif self.column in UNNOISED or rounds[position] % self.run.evaluate_every == 0:
                waited += 1
            if waited >= self.patience:
                reached = f"{values[best]:.4g} of round {rounds[best]}"
                self.run.stop(f"{self.column} has not improved on {reached} in {waited} evaluations")
                return
