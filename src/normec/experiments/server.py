"""The server's step of a configuration: its optimizer, its learning-rate schedule, and the average of the iterates."""

from __future__ import annotations

from typing import Any

from ..algorithms.averaging import Averaging
from ..algorithms.lr_schedule import LRSchedule
from ..algorithms.server_optimizer import ServerOptimizer
from ..errors import UsageError
from ..settings.assignments import format_assignments, parse_assignments
from ..settings.config import RunConfig


def optimizer(config: RunConfig) -> ServerOptimizer | None:
    """The server's optimizer; raises `UsageError` for settings without an optimizer."""
    if config.server_optimizer is None:
        _refuse(config, "server_optimizer", "server_optimizer_settings")
        return None
    return ServerOptimizer(config.server_optimizer, **parse_assignments(config.server_optimizer_settings or ""))


def schedule(config: RunConfig) -> LRSchedule | None:
    """The learning-rate schedule; raises `UsageError` for settings without a schedule."""
    if config.lr_schedule is None:
        _refuse(config, "lr_schedule", "lr_schedule_settings")
        return None
    return LRSchedule(config.lr_schedule, **parse_assignments(config.lr_schedule_settings or ""))


def average(config: RunConfig) -> Averaging | None:
    """The average of the iterates; raises `UsageError` for settings without one."""
    if config.averaging is None:
        _refuse(config, "averaging", "averaging_decay", "averaging_start")
        return None
    return Averaging(config.averaging, config.averaging_decay, config.averaging_start)


def check(config: RunConfig) -> None:
    """Raise `UsageError` where the server's step cannot be made."""
    optimizer(config)
    schedule(config)
    average(config)


def settings_used(config: RunConfig, rounds: int | None) -> dict[str, Any]:
    """The settings of the server's step with the values that are used; `rounds` None: they are not known."""
    used: dict[str, Any] = {}
    if (made := optimizer(config)) is not None:
        used["server_optimizer_settings"] = format_assignments(made.arguments) or None
    if (planned := schedule(config)) is not None:
        held = planned.settings_used(rounds - config.warmup) if rounds is not None else planned.settings
        given = {name: value for name, value in held.items() if value is not None}
        used["lr_schedule_settings"] = format_assignments(given) or None
    if (declared := average(config)) is not None:
        known = declared.planned(rounds, config.warmup) if rounds is not None else declared
        used |= {"averaging_decay": known.decay, "averaging_start": known.start}
    return used


def _refuse(config: RunConfig, needed: str, *settings: str) -> None:
    for name in settings:
        if getattr(config, name) is not None:
            raise UsageError(f"{name} goes with {needed}, which is not given; add {needed} or leave out {name}")
