"""Learning-rate schedules: how the server's step size changes over the rounds.

A schedule is worked out before the run begins, as a table of step sizes. So it has no state, a run that goes on after a
checkpoint has the same step sizes, and no schedule can depend on what the run measures.

This module imports torch only when a schedule is worked out: the command line needs the names without it.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, at_least, nearest, non_negative, one_of

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

SchedulerFactory = Callable[["Optimizer"], "LRScheduler"]
PLATEAU = "ReduceLROnPlateau reads what the run measures, which no noise covers; choose a schedule of the rounds"
# The settings of each schedule with their defaults; None is a third of the rounds after the ramp.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "constant": {"ramp_up": 0},
    "cosine": {"ramp_up": 0, "end": 0.0},
    "linear": {"ramp_up": 0, "end": 0.0},
    "step": {"ramp_up": 0, "every": None, "factor": 0.1},
}


class LRSchedule:
    """A learning-rate schedule: a name with settings, or a function that makes a torch scheduler.

    With T rounds in which x moves, t = 0, …, T − 1, and after a ramp of R rounds, s = (t − R)/(T − R):

        constant   lr
        cosine     lr · (end + (1 − end) (1 + cos πs)/2)
        linear     lr · (1 − (1 − end) s)
        step       lr · factor^⌊(t − R)/every⌋

    In the ramp (linear warm-up) the step size is lr · (t + 1)/R.

    Args:
        schedule: "constant", "cosine", "linear", "step", the name of a class in `torch.optim.lr_scheduler`, or a
            function that takes an optimizer and returns a scheduler of it. A scheduler of torch makes one step per
            round.
        settings: `ramp_up` is R, `end` the share of lr at the end, `every` the rounds between two reductions (default:
            a third of the rounds after the ramp), and `factor` what a reduction multiplies by. A class of torch has
            its own settings.

    Raises:
        UsageError: There is no such schedule or setting, or the scheduler reads what the run measures.

    Example:
        >>> [round(lr, 2) for lr in LRSchedule("cosine", ramp_up=2).table(lr=1.0, rounds=5)]
        [0.5, 1.0, 1.0, 0.75, 0.25]
        >>> import torch
        >>> halving = LRSchedule(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
        >>> halving.table(lr=1.0, rounds=3)
        [1.0, 0.5, 0.25]
    """

    def __init__(self, schedule: str | SchedulerFactory, **settings: Any) -> None:
        self._factory: SchedulerFactory | None = None
        if isinstance(schedule, str):
            self.name, self.settings = schedule, dict(settings)
            if schedule not in SCHEDULES:
                self._factory = _of_torch(schedule, settings)
                return
            known = SCHEDULES[schedule]
            for setting in settings:
                if setting not in known:
                    raise UsageError(f"the schedule {schedule} has no setting {setting!r}{nearest(setting, known)}")
            self.settings = {**known, **settings}
            at_least(0, ramp_up=self.settings["ramp_up"])
            non_negative(**{name: self.settings[name] for name in ("end", "factor") if name in self.settings})
            if self.settings.get("every") is not None:
                at_least(1, every=self.settings["every"])
        elif callable(schedule):
            if settings:
                raise UsageError(
                    f"settings go with the name of a schedule, got {', '.join(settings)} with a function; "
                    "put them into the function"
                )
            self.name, self.settings, self._factory = "", {}, schedule
        else:
            raise UsageError(
                "lr_schedule must be a name such as 'cosine', a normec.LRSchedule, or a function from an optimizer to "
                f"a torch scheduler, such as lambda optimizer: StepLR(optimizer, 10), got {type(schedule).__name__}; a "
                "function of the round is given as lr"
            )

    def table(self, lr: float, rounds: int) -> list[float]:
        """The step sizes of so many rounds.

        Args:
            lr: The step size that the schedule scales.
            rounds: The number of rounds in which x moves.

        Returns:
            One step size for each round.

        Raises:
            UsageError: The scheduler needs more than the number of the round.
        """
        if self._factory is not None:
            return _tabulated(self._factory, lr, rounds)
        settings = self.settings_used(rounds)
        ramp = settings["ramp_up"]
        if ramp >= rounds:
            raise UsageError(f"ramp_up must be below the {rounds} rounds in which x moves, got {ramp}")
        factors = [
            (t + 1) / ramp if t < ramp else self._factor(t - ramp, rounds - ramp, settings) for t in range(rounds)
        ]
        return [lr * factor for factor in factors]

    def settings_used(self, rounds: int) -> dict[str, Any]:
        """The settings with the values that are used where x moves in so many rounds."""
        if "every" not in self.settings or self.settings["every"] is not None or self._factory is not None:
            return self.settings
        return {**self.settings, "every": max(1, (rounds - self.settings["ramp_up"]) // 3)}

    def _factor(self, t: int, rounds: int, settings: Mapping[str, Any]) -> float:
        match self.name:
            case "cosine":
                return float(settings["end"] + (1 - settings["end"]) * (1 + math.cos(math.pi * t / rounds)) / 2)
            case "linear":
                return float(1 - (1 - settings["end"]) * t / rounds)
            case "step":
                return float(settings["factor"] ** (t // settings["every"]))
        return 1.0


@dataclass(frozen=True)
class ScheduledLR:
    """The step size of every round, as a function of the round.

    Attributes:
        lr: The step size that the schedule scales.
        schedule: The schedule.
        sizes: The step sizes, from the first round in which x moves.
        first: That round.
    """

    lr: float
    schedule: LRSchedule
    sizes: tuple[float, ...]
    first: int

    def __call__(self, k: int) -> float:
        """The step size of round k."""
        return self.sizes[min(max(k - self.first, 0), len(self.sizes) - 1)]


def scheduled(
    schedule: str | LRSchedule | SchedulerFactory, lr: float | Callable[[int], float], rounds: int, warmup: int
) -> ScheduledLR:
    """Return the step sizes of all rounds.

    Raises:
        UsageError: `lr` is not a number, or the schedule is unknown.
    """
    if not isinstance(lr, float):
        raise UsageError(
            "lr_schedule scales a step size that is a number; give lr as a number, or leave out lr_schedule"
        )
    declared = schedule if isinstance(schedule, LRSchedule) else LRSchedule(schedule)
    return ScheduledLR(lr, declared, tuple(declared.table(lr, rounds - warmup)), warmup)


def _of_torch(name: str, settings: Mapping[str, Any]) -> SchedulerFactory:
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    classes = {
        title: kind
        for title, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, base) and title[0] != "_" and kind is not base
    }
    one_of((*SCHEDULES, *classes), lr_schedule=name)
    kind: Any = classes[name]
    if kind is lr_scheduler.ReduceLROnPlateau:
        raise UsageError(PLATEAU)
    taken = [one for one in inspect.signature(kind).parameters if one != "optimizer"]
    for setting in settings:
        if setting not in taken:
            raise UsageError(f"{name} has no setting {setting!r}{nearest(setting, taken)}")
    return lambda optimizer: kind(optimizer, **settings)


def _tabulated(factory: SchedulerFactory, lr: float, rounds: int) -> list[float]:
    """Run a torch scheduler once on an optimizer of its own, and write down the step sizes."""
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    group, sizes = optimizer.param_groups[0], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scheduler: Any = factory(optimizer)
        except Exception as error:  # whatever is wrong with a scheduler's settings is said in one line
            raise UsageError(
                f"the scheduler cannot be made: {type(error).__name__}: {error}; give its settings in a function, such "
                "as lambda optimizer: StepLR(optimizer, 10), or as normec.LRSchedule('StepLR', step_size=10)"
            ) from None
        if not isinstance(scheduler, LRScheduler):
            found = type(scheduler).__name__
            raise UsageError(f"the function given as lr_schedule must return a torch scheduler, got a {found}")
        if _reads_measurements(scheduler):
            raise UsageError(PLATEAU)
        others = {name: value for name, value in group.items() if name not in ("params", "lr")}
        for t in range(rounds):
            sizes.append(float(group["lr"]))
            if t < rounds - 1:
                optimizer.step()
                try:
                    scheduler.step()
                except Exception as error:  # whatever a scheduler says after its last round
                    raise UsageError(f"the scheduler ends in round {t + 1}: {type(error).__name__}: {error}") from None
            changed = [name for name, value in others.items() if group[name] != value]
            if changed:
                raise UsageError(
                    f"the scheduler changes {changed[0]} too, and a schedule is of the step size alone; "
                    "for CyclicLR and OneCycleLR give cycle_momentum=False"
                )
    return sizes


def _reads_measurements(scheduler: Any) -> bool:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    inner = getattr(scheduler, "_schedulers", ())
    return isinstance(scheduler, ReduceLROnPlateau) or any(map(_reads_measurements, inner))
