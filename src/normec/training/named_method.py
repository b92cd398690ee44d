"""A method that is given by name, with the settings that the command line uses for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from ..algorithms.catalogue import CATALOGUE, FOR_RECORDS, METHODS, ROUNDS, Entry
from ..algorithms.local_steps import LocalSteps
from ..algorithms.method import Method
from ..algorithms.registry import find
from ..algorithms.server_optimizer import ServerOptimizer
from ..errors import UsageError, non_negative, one_of
from ..problems.objective import Objective
from ..sampling.participation import Everyone, FixedSize, Participation, Poisson, Rotation

_LARGEST = 3e38  # a longer step leaves the range of float32

StepSize = float | Callable[[int], float] | Literal["theory"]


def method_of(
    given: Method | str,
    problem: Objective,
    private: bool,
    participation: Participation | None,
    clips_records: bool = False,
) -> tuple[Method, Entry | None]:
    """Return the method and, for a name of the catalogue, its entry.

    Args:
        given: A method, or a name as on the command line: "normec", or "my_method.py:MyMethod".
        problem: The problem that it is for.
        private: Whether messages get noise, for which some usual settings differ.
        participation: Who takes part, for methods that need the share.
        clips_records: Whether records are protected and clipped one by one, for which some usual settings differ.

    Raises:
        UsageError: There is no such method.
    """
    if isinstance(given, Method):
        return given, None
    if not isinstance(given, str):
        raise UsageError(
            f"method must be a normec.Method or a name, such as normec.NormEC(0.01, 0.1) or 'normec', "
            f"got {type(given).__name__ if not isinstance(given, type) else f'the class {given.__name__}'}"
        )
    if given not in CATALOGUE:
        if ":" not in given:
            one_of((*METHODS, "FILE.py:CLASS"), method=given)
        return find(given)(), None
    entry = for_records(given) if clips_records else CATALOGUE[given]
    sizes = getattr(problem, "tensor_sizes", (len(problem.x0),))
    share = _share(given, participation, problem.clients) if entry.takes("participation") else 1.0
    return entry.build(entry.defaults(private), sizes, share), entry


def for_records(name: str) -> Entry:
    """Return the catalogue's entry of a method, with its usual settings where clipped records are protected."""
    entry, usual = CATALOGUE[name], FOR_RECORDS.get(name)
    if usual is None:
        return entry
    own = {setting: value for setting, value in usual.items() if setting in entry.settings}
    return replace(
        entry,
        private={**(entry.private or {}), **own},
        private_lr=usual["lr"],
        private_rounds=usual.get("rounds", entry.private_rounds),
    )


def _share(method: str, participation: Participation | None, clients: int) -> float:
    """Return the share of the clients that take part in a round."""
    match participation:
        case None | Everyone():
            return 1.0
        case Poisson(rate):
            return rate
        case FixedSize(count):
            return count / clients
        case Rotation(groups, rate):
            return rate / groups
    raise UsageError(
        f"{method} depends on the share of the clients that take part, which {type(participation).__name__} does not "
        "state; give the method as an object, with its setting participation"
    )


def step_size_of(
    lr: StepSize | None, method: Method, entry: Entry | None, private: bool, optimizer: ServerOptimizer | None
) -> StepSize:
    """Return the step size: the given one, or the usual one of a method that was given by name."""
    if lr is None:
        if entry is None:
            raise UsageError(
                f"lr must be given: a usual step size is known for methods by name, such as method='normec', "
                f"not for {method.name} with settings of its own"
            )
        plain = entry.step_size(entry.defaults(private), private)
        return plain if optimizer is None else optimizer.usual_lr(plain)
    if isinstance(lr, str):
        if lr != "theory":
            raise UsageError(f"lr must be a number, a function of the round or 'theory', got the text {lr!r}")
        return lr
    if callable(lr):
        return lr
    try:
        size = float(lr)
    except (TypeError, ValueError):
        raise UsageError(
            f"lr must be a number, a function of the round or 'theory', got {type(lr).__name__}; "
            "a scheduler goes into lr_schedule"
        ) from None
    non_negative(lr=size)
    if size > _LARGEST:
        raise UsageError(f"lr must lie in [0, {_LARGEST:g}], got {size:g}")
    return size


def rounds_of_method(entry: Entry | None, private: bool) -> int | None:
    """Return the usual rounds of a method that was given by name; None for any other."""
    if entry is None:
        return None
    return entry.private_rounds if private else ROUNDS


def local_steps_of(entry: Entry | None, private: bool) -> LocalSteps | None:
    """Return the usual local steps of a method that was given by name; None for a method that sends one gradient."""
    used: dict[str, Any] = entry.local_defaults(private) if entry is not None else {}
    return LocalSteps(**{name.removeprefix("local_"): value for name, value in used.items()}) if used else None
