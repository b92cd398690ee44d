"""The exceptions of the library, and argument checks with one-line messages.

Every check takes keyword arguments, so that the message names the argument as the user wrote it:
``positive(beta=-1)`` raises ``UsageError("beta must be > 0 and finite, got -1")``. NaN fails every check.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class UsageError(ValueError):
    """A mistake of the caller. The message is one line that names the value, the limit and the cure.

    Example:
        >>> positive(beta=-1)
        Traceback (most recent call last):
        ...
        normec.errors.UsageError: beta must be > 0 and finite, got -1
    """


class Diverged(RuntimeError):  # noqa: N818  (a state of a run, not a mistake of the caller)
    """Training met a value that is not finite, or a message that exceeds its bound.

    Args:
        round: The round in which it happened.
        clients: The clients that it happened to; empty if it concerns all of them.
        what: The value, such as "the loss".
        how: What is wrong with it.
        cure: What may help (default: a smaller lr, or a look at the data in the first round).

    Example:
        >>> print(Diverged(3, [1], "the loss"))
        the loss of client 1 is not finite in round 3; a smaller lr may cure it
    """

    def __init__(self, round: int, clients: list[int], what: str, how: str = "is not finite", cure: str = "") -> None:
        named = ", ".join(map(str, clients[:5])) + (" …" if len(clients) > 5 else "")
        who = f" of client{'s' if len(clients) > 1 else ''} {named}" if clients else ""
        cure = cure or ("a smaller lr may cure it" if round else "look at the data, the model and the loss")
        super().__init__(f"{what}{who} {how} in round {round}; {cure}")
        self.round, self.clients = round, clients


class BudgetSpent(RuntimeError):  # noqa: N818  (a state of the run, not a mistake)
    """The release would exceed the budget; it was not written to the ledger, and must not be made.

    Args:
        round: The round of the release.
        epsilon: The ε that the release would lead to.
        budget: The ε that must not be exceeded.
        releases: How many releases were paid for before. More than one per round are named in the message: they are
            repeated rounds, or those of an earlier training with the same ledger.

    Example:
        >>> print(BudgetSpent(12, 8.13, 8.0))
        round 12 would bring epsilon to 8.13, above the budget of 8; training stops here
    """

    def __init__(self, round: int, epsilon: float, budget: float, releases: int = 0) -> None:
        before = (
            f"; the account already holds {releases} releases, of an earlier training or of repeated rounds"
            if releases > round
            else ""
        )
        super().__init__(
            f"round {round} would bring epsilon to {epsilon:.6g}, above the budget of {budget:g}{before}; "
            "training stops here"
        )
        self.round, self.epsilon, self.budget = round, epsilon, budget

    @classmethod
    def from_text(cls, round: int, text: str) -> BudgetSpent:
        """Return the same error as on another rank, from its text."""
        known = cls.__new__(cls)
        RuntimeError.__init__(known, text)
        known.round, known.epsilon, known.budget = round, math.nan, math.nan
        return known


class WireError(ValueError):
    """A message of a federation violates a rule of the format. The error names the rule and nothing of the contents."""


class Unwritable(OSError):  # noqa: N818  (a state of the disk, not a mistake of the caller)
    """A file could not be written; the message names its path. Files that were complete before are still complete."""


class RankLost(RuntimeError):  # noqa: N818  (a state of the job, not a mistake of the caller)
    """Another process of the job hangs or has died; the message names it."""


class Interrupted(Exception):  # noqa: N818  (a request of the user)
    """Ctrl-C stopped the work after the current round; what was done is kept."""


def _is_so(value: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether a condition holds; it never does for a value that is not a number, such as the text "8"."""
    try:
        return bool(holds(value))
    except TypeError:
        return False


def _shown(value: object) -> str:
    return f"the text {value!r}" if isinstance(value, str) else str(value)


def finite(**values: float) -> None:
    for name, value in values.items():
        if not _is_so(value, math.isfinite):
            raise UsageError(f"{name} must be finite, got {_shown(value)}")


def positive(**values: float) -> None:
    for name, value in values.items():
        if not _is_so(value, lambda one: one > 0 and math.isfinite(one)):
            raise UsageError(f"{name} must be > 0 and finite, got {_shown(value)}")


def non_negative(**values: float) -> None:
    for name, value in values.items():
        if not _is_so(value, lambda one: one >= 0 and math.isfinite(one)):
            raise UsageError(f"{name} must be >= 0 and finite, got {_shown(value)}")


def open_unit(**values: float) -> None:
    """Check that values lie strictly between 0 and 1, like a failure probability."""
    for name, value in values.items():
        if not _is_so(value, lambda one: 0 < one < 1):
            raise UsageError(f"{name} must lie in (0, 1), got {_shown(value)}")


def below_one(**values: float) -> None:
    """Check that values lie in [0, 1), like a momentum or a rate of forgetting."""
    for name, value in values.items():
        if not _is_so(value, lambda one: 0 <= one < 1):
            raise UsageError(f"{name} must lie in [0, 1), got {_shown(value)}")


def first_mistake(error: ValidationError, levels: int | None = None) -> str:
    """Return the first mistake that pydantic found, in one line: the entry, the rule and the value.

    `levels`: of the path to the entry, how many to show; pydantic adds the type that was tried to an entry of several.
    """
    first = error.errors()[0]
    where, rule = ".".join(map(str, first["loc"][:levels])), first["msg"]
    return f"{where}: {rule[:1].lower()}{rule[1:]}, got {first['input']!r}"


def fraction(**values: float) -> None:
    """Check that values lie in (0, 1], like a rate."""
    for name, value in values.items():
        if not _is_so(value, lambda one: 0 < one <= 1):
            raise UsageError(f"{name} must lie in (0, 1], got {_shown(value)}")


def at_least(minimum: int, **values: object) -> None:
    """Check that values are whole numbers, of Python or NumPy, and not below `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            raise UsageError(f"{name} must be a whole number >= {minimum}, got {value!r}")


def one_of(choices: Iterable[str], **values: str) -> None:
    """Check that values are known names; the message suggests the nearest one."""
    known = list(choices)
    for name, value in values.items():
        if value not in known:
            raise UsageError(f"unknown {name} {value!r}{nearest(value, known)}; choose from {', '.join(known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ', did you mean …?' with the closest known word, whatever its capitals, or an empty text."""
    lowered = {one.lower(): one for one in known}
    close = difflib.get_close_matches(str(word).lower(), lowered, n=1, cutoff=0.6)
    return f", did you mean {lowered[close[0]]!r}?" if close else ""


def needed(module: str, extra: str | None = None) -> Any:
    """Import a package that some runs need.

    Args:
        module: The module to import.
        extra: The extra of normec that installs it; None for a package that is installed under its own name.

    Raises:
        UsageError: The package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = f"'normec[{extra}]'" if extra is not None else package
        raise UsageError(f"{package} is needed and not installed; pip install {command}") from error
